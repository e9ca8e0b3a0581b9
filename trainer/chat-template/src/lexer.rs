//! Splits a template into text and tokens, with Jinja's rules for white space as transformers sets them: the line end after a
//! block is removed (`trim_blocks`), and white space before a block that begins a line (`lstrip_blocks`).

use crate::Error;

/// A token and its line, from 1.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Token {
    pub(crate) line: usize,
    pub(crate) kind: TokenKind,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum TokenKind {
    /// Text outside of tags.
    Data(String),
    BlockBegin,
    BlockEnd,
    VariableBegin,
    VariableEnd,
    Name(String),
    Str(String),
    Int(i128),
    Float(f64),
    Op(&'static str),
}

/// Longest first.
const OPERATORS: [&str; 26] = [
    "**", "//", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";",
];

/// Returns whether Python counts the character as white space.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Splits a template into tokens.
pub(crate) fn tokens(source: &str) -> Result<Vec<Token>, Error> {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = source.strip_suffix('\n').unwrap_or(&source);
    let mut lexer = Lexer {
        source,
        at: 0,
        line: 1,
        line_starting: true,
        tokens: Vec::new(),
    };
    lexer.root()?;
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: usize,
    /// Whether the last match ended with a line end.
    line_starting: bool,
    tokens: Vec<Token>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn fail<T>(&self, message: impl Into<String>) -> Result<T, Error> {
        Err(Error::new(message).at(self.line))
    }

    /// Moves on over a match of `bytes` bytes.
    fn advance(&mut self, bytes: usize) {
        let matched = &self.rest()[..bytes];
        self.line += matched.matches('\n').count();
        self.line_starting = matched.ends_with('\n');
        self.at += bytes;
    }

    fn push(&mut self, kind: TokenKind) {
        self.tokens.push(Token {
            line: self.line,
            kind,
        });
    }

    fn root(&mut self) -> Result<(), Error> {
        loop {
            let rest = self.rest();
            let tags = ["{%", "{{", "{#"].map(|tag| rest.find(tag));
            let Some(start) = tags.into_iter().flatten().min() else {
                if !rest.is_empty() {
                    self.push(TokenKind::Data(rest.into()));
                }
                return Ok(());
            };
            let tag = &rest[start..start + 2];
            let sign = rest[start + 2..].chars().next();
            let sign = sign.filter(|sign| matches!(sign, '-' | '+'));
            self.data(&rest[..start], sign, tag != "{{");
            let inside = start + 2 + usize::from(sign.is_some());
            match tag {
                "{#" => {
                    self.advance(inside);
                    self.comment()?;
                }
                "{{" => {
                    self.advance(inside);
                    self.push(TokenKind::VariableBegin);
                    self.tag(false)?;
                }
                _ => match raw(&rest[inside..]) {
                    Some(bytes) => {
                        self.advance(inside + bytes);
                        self.raw()?;
                    }
                    None => {
                        self.advance(inside);
                        self.push(TokenKind::BlockBegin);
                        self.tag(true)?;
                    }
                },
            }
        }
    }

    /// Adds the text before a tag.
    fn data(&mut self, text: &str, sign: Option<char>, lstrip: bool) {
        let kept = match sign {
            Some('-') => text.trim_end_matches(is_space),
            None if lstrip => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let blank = line < text.len() && text[line..].chars().all(is_space);
                match blank && (line > 0 || self.line_starting) {
                    true => &text[..line],
                    false => text,
                }
            }
            _ => text,
        };
        if !kept.is_empty() {
            self.push(TokenKind::Data(kept.into()));
        }
    }

    fn comment(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        let Some(end) = rest.find("#}") else {
            return self.fail("a comment has no end");
        };
        let strips = rest[..end].ends_with('-');
        let keeps = rest[..end].ends_with('+');
        self.advance(end + 2);
        self.after_end(strips, !keeps);
        Ok(())
    }

    /// Skips what the end of a tag takes with it.
    fn after_end(&mut self, strips: bool, trims: bool) {
        let rest = self.rest();
        let bytes = match strips {
            true => rest.len() - rest.trim_start_matches(is_space).len(),
            false => usize::from(trims && rest.starts_with('\n')),
        };
        if bytes > 0 {
            self.advance(bytes);
        }
    }

    /// Takes the text up to `{% endraw %}`.
    fn raw(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        for (start, _) in rest.match_indices("{%") {
            let tag = &rest[start + 2..];
            let sign = tag.chars().next().filter(|sign| matches!(sign, '-' | '+'));
            let word = tag[usize::from(sign.is_some())..].trim_start_matches(is_space);
            let Some(end) = word.strip_prefix("endraw") else {
                continue;
            };
            let end = end.trim_start_matches(is_space);
            let (strips, keeps) = (end.starts_with('-'), end.starts_with('+'));
            let Some(after) = end[usize::from(strips || keeps)..].strip_prefix("%}") else {
                continue;
            };
            self.data(&rest[..start], sign, true);
            self.advance(rest.len() - after.len());
            self.after_end(strips, !keeps);
            return Ok(());
        }
        self.fail("a raw block has no end")
    }

    /// Takes the tokens of a block or an expression, and its end.
    fn tag(&mut self, block: bool) -> Result<(), Error> {
        let end = if block { "%}" } else { "}}" };
        let mut open: Vec<char> = Vec::new();
        loop {
            let rest = self.rest();
            let Some(first) = rest.chars().next() else {
                return self.fail("a tag has no end");
            };
            if open.is_empty() {
                let sign = usize::from(first == '-' || block && first == '+');
                if rest[sign..].starts_with(end) {
                    self.push(match block {
                        true => TokenKind::BlockEnd,
                        false => TokenKind::VariableEnd,
                    });
                    self.advance(sign + 2);
                    self.after_end(first == '-', block && first != '+');
                    return Ok(());
                }
            }
            if is_space(first) {
                let bytes = rest.len() - rest.trim_start_matches(is_space).len();
                self.advance(bytes);
            } else if first.is_ascii_digit() {
                self.number()?;
            } else if first.is_alphanumeric() || first == '_' {
                let is_name = |c: char| c.is_alphanumeric() || c == '_';
                let bytes = rest.len() - rest.trim_start_matches(is_name).len();
                self.push(TokenKind::Name(rest[..bytes].into()));
                self.advance(bytes);
            } else if matches!(first, '\'' | '"') {
                self.text(first)?;
            } else {
                let found = OPERATORS.iter().find(|op| rest.starts_with(**op));
                let Some(op) = found else {
                    return self.fail(format!("unexpected character {first:?}"));
                };
                match *op {
                    "(" => open.push(')'),
                    "[" => open.push(']'),
                    "{" => open.push('}'),
                    ")" | "]" | "}" if open.pop() != Some(first) => {
                        return self.fail(format!("unexpected \"{op}\""));
                    }
                    _ => {}
                }
                self.push(TokenKind::Op(op));
                self.advance(op.len());
            }
        }
    }

    fn number(&mut self) -> Result<(), Error> {
        let rest = self.rest();
        let digits = |text: &str| {
            let is_digit = |c: char| c.is_ascii_digit() || c == '_';
            text.len() - text.trim_start_matches(is_digit).len()
        };
        let radix = match rest.as_bytes() {
            [b'0', b'x' | b'X', ..] => 16,
            [b'0', b'o' | b'O', ..] => 8,
            [b'0', b'b' | b'B', ..] => 2,
            _ => 10,
        };
        if radix != 10 {
            let is_digit = |c: char| c.is_digit(radix) || c == '_';
            let bytes = rest.len() - rest[2..].trim_start_matches(is_digit).len();
            let plain = rest[2..bytes].replace('_', "");
            return match i128::from_str_radix(&plain, radix) {
                Ok(number) => {
                    self.push(TokenKind::Int(number));
                    self.advance(bytes);
                    Ok(())
                }
                Err(error) => self.fail(format!("{}: {error}", &rest[..bytes])),
            };
        }
        let whole = digits(rest);
        let mut end = whole;
        // After a dot it is the index of an element, which has no fraction.
        let is_index = self.source[..self.at].ends_with('.');
        let part = |at: usize| {
            let digits = digits(&rest[at..]);
            (digits > 0 && rest[at..].starts_with(|c: char| c.is_ascii_digit())).then_some(digits)
        };
        if !is_index {
            if rest[end..].starts_with('.')
                && let Some(digits) = part(end + 1)
            {
                end += 1 + digits;
            }
            if rest[end..].starts_with(['e', 'E']) {
                let sign = usize::from(rest[end + 1..].starts_with(['+', '-']));
                if let Some(digits) = part(end + 1 + sign) {
                    end += 1 + sign + digits;
                }
            }
        }
        let plain = rest[..end].replace('_', "");
        let kind = match end == whole {
            true => plain.parse().map(TokenKind::Int).ok(),
            false => plain.parse().map(TokenKind::Float).ok(),
        };
        match kind {
            Some(kind) => self.push(kind),
            None => return self.fail(format!("{plain}: number too large")),
        }
        self.advance(end);
        Ok(())
    }

    /// Takes a text in quotes, with Python's escapes.
    fn text(&mut self, quote: char) -> Result<(), Error> {
        let rest = self.rest();
        let mut text = String::new();
        let mut chars = rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            if c == quote {
                self.push(TokenKind::Str(text));
                self.advance(at + 1);
                return Ok(());
            }
            if c != '\\' {
                text.push(c);
                continue;
            }
            let Some((_, escaped)) = chars.next() else {
                break;
            };
            let mut code = |digits: usize| -> Option<char> {
                let hex = rest[at + 2..].get(..digits)?;
                let code = u32::from_str_radix(hex, 16).ok().and_then(char::from_u32)?;
                chars.nth(digits - 1);
                Some(code)
            };
            let found = match escaped {
                // A line end after a backslash is dropped.
                '\n' => continue,
                'n' => Some('\n'),
                't' => Some('\t'),
                'r' => Some('\r'),
                'a' => Some('\x07'),
                'b' => Some('\x08'),
                'f' => Some('\x0c'),
                'v' => Some('\x0b'),
                '\\' | '\'' | '"' => Some(escaped),
                'x' => code(2),
                'u' => code(4),
                'U' => code(8),
                'N' => None,
                '0'..='7' => {
                    let octal = rest[at + 1..].chars().take(3);
                    let digits = octal.take_while(|c| c.is_digit(8)).count();
                    let number = u32::from_str_radix(&rest[at + 1..at + 1 + digits], 8);
                    for _ in 1..digits {
                        chars.next();
                    }
                    number.ok().and_then(char::from_u32)
                }
                other => {
                    text.push('\\');
                    Some(other)
                }
            };
            match found {
                Some(c) => text.push(c),
                None => {
                    return self.fail(format!("unknown escape \\{escaped} in a text"));
                }
            }
        }
        self.fail("a text in quotes has no end")
    }
}

/// Returns the length of what makes a tag a `raw` block, and of what its end takes with it.
fn raw(tag: &str) -> Option<usize> {
    let word = tag.trim_start_matches(is_space).strip_prefix("raw")?;
    let end = word.trim_start_matches(is_space);
    let after = match end.strip_prefix("-%}") {
        Some(after) => after.trim_start_matches(is_space),
        None => end.strip_prefix("%}")?,
    };
    Some(tag.len() - after.len())
}
