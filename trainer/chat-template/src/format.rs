//! Python's `format % values`, `str.format` and format specifications.

use crate::args::Arguments;
use crate::expressions::{attribute, item};
use crate::{Error, Value, python};

/// Widest field.
const WIDTH_MAX: usize = 100_000;

/// How a value is written in a field.
#[derive(Default)]
struct Spec {
    fill: Option<char>,
    /// `<`, `>`, `^` or `=`.
    align: Option<char>,
    /// `+` or a space.
    sign: Option<char>,
    alternate: bool,
    zero: bool,
    width: usize,
    group: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

/// Python's `format % values`.
pub(crate) fn percent(format: &str, values: &Value) -> Result<String, Error> {
    let tuple = match values {
        Value::Seq(seq) if seq.kind == crate::value::SeqKind::Tuple => Some(&seq.items),
        _ => None,
    };
    let mut given = match tuple {
        Some(items) => items.clone(),
        None => vec![values.clone()],
    }
    .into_iter();
    let few = || Error::new("not enough arguments for format string");
    let mut by_name = false;
    let mut out = String::new();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut named = None;
        if chars.next_if_eq(&'(').is_some() {
            let name: String = chars.by_ref().take_while(|c| *c != ')').collect();
            let Value::Map(map) = values else {
                return Err(Error::new("format requires a mapping"));
            };
            by_name = true;
            named = Some(
                map.get(&name)
                    .cloned()
                    .ok_or_else(|| Error::new(format!("'{name}'")))?,
            );
        }
        let mut spec = Spec::default();
        while let Some(flag) = chars.next_if(|c| "-+ #0".contains(*c)) {
            match flag {
                '-' => spec.align = Some('<'),
                '#' => spec.alternate = true,
                '0' => spec.zero = true,
                sign => spec.sign = spec.sign.filter(|sign| *sign == '+').or(Some(sign)),
            }
        }
        let mut number =
            |chars: &mut std::iter::Peekable<std::str::Chars<'_>>| match chars.next_if_eq(&'*') {
                Some(_) => match given.next().as_ref().map(python::as_int) {
                    Some(Some(number)) => Ok(Some(number)),
                    Some(None) => Err(Error::new("* wants int")),
                    None => Err(few()),
                },
                None => {
                    let mut digits = String::new();
                    while let Some(digit) = chars.next_if(char::is_ascii_digit) {
                        digits.push(digit);
                    }
                    Ok(digits.parse().ok())
                }
            };
        if let Some(width) = number(&mut chars)? {
            if width < 0 {
                spec.align = Some('<');
            }
            spec.width = usize::try_from(width.abs()).unwrap_or(usize::MAX);
        }
        if chars.next_if_eq(&'.').is_some() {
            let precision = number(&mut chars)?.unwrap_or(0);
            spec.precision = Some(usize::try_from(precision).unwrap_or(0));
        }
        while chars.next_if(|c| "hlL".contains(*c)).is_some() {}
        let Some(kind) = chars.next() else {
            return Err(Error::new("incomplete format"));
        };
        if kind == '%' {
            out.push('%');
            continue;
        }
        let value = match named {
            Some(value) => value,
            None => given.next().ok_or_else(few)?,
        };
        spec.align.get_or_insert('>');
        out += &converted(&value, kind, spec)?;
    }
    // A mapping may have more than the format uses.
    if !by_name && given.next().is_some() && (tuple.is_some() || values.as_map().is_none()) {
        return Err(Error::new(
            "not all arguments converted during string formatting",
        ));
    }
    Ok(out)
}

/// Writes a value as the conversion `kind` of `%` does.
fn converted(value: &Value, kind: char, mut spec: Spec) -> Result<String, Error> {
    let needs = |wanted: &str| {
        Error::new(format!(
            "%{kind} format: {wanted} is required, not {}",
            python::type_name(value)
        ))
    };
    if matches!(kind, 's' | 'r' | 'a' | 'c') {
        spec.zero = false;
        let text = match kind {
            's' => python::str(value),
            'c' => match python::as_int(value).and_then(|code| u32::try_from(code).ok()) {
                Some(code) => char::from_u32(code)
                    .map(String::from)
                    .ok_or_else(|| needs("a character"))?,
                None => python::str(value),
            },
            _ => python::repr(value),
        };
        return spec.text(&text);
    }
    let value = match kind {
        'd' | 'i' | 'u' => match value {
            Value::Float(number) if number.is_finite() => Value::Int(number.trunc() as i128),
            value => Value::Int(python::as_int(value).ok_or_else(|| needs("a real number"))?),
        },
        'x' | 'X' | 'o' => Value::Int(python::as_int(value).ok_or_else(|| needs("an integer"))?),
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            Value::Float(python::as_f64(value).ok_or_else(|| needs("a real number"))?)
        }
        other => {
            return Err(Error::new(format!(
                "unsupported format character '{other}'"
            )));
        }
    };
    spec.kind = Some(if matches!(kind, 'i' | 'u') { 'd' } else { kind });
    if spec.zero && spec.align == Some('>') {
        (spec.fill, spec.align) = (Some('0'), Some('='));
    }
    spec.number(&value)
}

/// Python's `format.format(...)`.
pub(crate) fn str_format(format: &str, args: &Arguments) -> Result<String, Error> {
    let mut next = 0;
    fill(format, args, &mut next, 0)
}

fn fill(format: &str, args: &Arguments, next: &mut usize, depth: usize) -> Result<String, Error> {
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find(['{', '}']) {
        out += &rest[..at];
        let brace = &rest[at..=at];
        let inside = &rest[at + 1..];
        if let Some(after) = inside.strip_prefix(brace) {
            out += brace;
            rest = after;
            continue;
        }
        if brace == "}" {
            return Err(Error::new("Single '}' encountered in format string"));
        }
        let mut open = 1;
        let end = inside.find(|c: char| {
            open += i32::from(c == '{') - i32::from(c == '}');
            open == 0
        });
        let Some(end) = end else {
            return Err(Error::new("expected '}' before end of string"));
        };
        if depth == 2 {
            return Err(Error::new("Max string recursion exceeded"));
        }
        let field = &inside[..end];
        rest = &inside[end + 1..];
        let (name, spec) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = name.split_once('!').unwrap_or((name, ""));
        let value = field_value(name, args, next)?;
        let value = match conversion {
            "" => value,
            "s" => python::str(&value).into(),
            "r" | "a" => python::repr(&value).into(),
            _ => return Err(Error::new(format!("unknown conversion '{conversion}'"))),
        };
        let spec = fill(spec, args, next, depth + 1)?;
        out += &formatted(&value, &spec)?;
    }
    Ok(out + rest)
}

/// Returns the value of a field like `0`, `name`, `name.attribute` or `name[key]`.
fn field_value(name: &str, args: &Arguments, next: &mut usize) -> Result<Value, Error> {
    let end = name.find(['.', '[']).unwrap_or(name.len());
    let (first, mut rest) = name.split_at(end);
    let mut value = if first.is_empty() || first.bytes().all(|byte| byte.is_ascii_digit()) {
        let index = match first {
            "" => {
                *next += 1;
                *next - 1
            }
            number => number.parse().unwrap_or(usize::MAX),
        };
        args.positional.get(index).cloned().ok_or_else(|| {
            Error::new(format!(
                "Replacement index {index} out of range for positional args tuple"
            ))
        })?
    } else {
        let found = args.keywords.iter().find(|(known, _)| known == first);
        found
            .map(|(_, value)| value.clone())
            .ok_or_else(|| Error::new(format!("'{first}'")))?
    };
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('.') {
            let end = after.find(['.', '[']).unwrap_or(after.len());
            value = attribute(&value, &after[..end])?;
            rest = &after[end..];
        } else {
            let Some(end) = rest.find(']') else {
                return Err(Error::new("expected '}' before end of string"));
            };
            let key = &rest[1..end];
            let key = key.parse::<i128>().map_or_else(|_| key.into(), Value::Int);
            value = item(&value, &key)?;
            rest = &rest[end + 1..];
        }
    }
    Ok(value)
}

/// Python's `format(value, spec)`.
fn formatted(value: &Value, spec: &str) -> Result<String, Error> {
    if spec.is_empty() {
        return Ok(python::str(value));
    }
    let spec = Spec::parse(spec)?;
    match value {
        Value::Str(text) if matches!(spec.kind, None | Some('s')) => spec.text(text),
        Value::Int(_) | Value::Float(_) | Value::Bool(_) if spec.kind != Some('s') => {
            spec.number(value)
        }
        other => Err(Error::new(format!(
            "unsupported format string passed to {}.__format__",
            python::type_name(other)
        ))),
    }
}

impl Spec {
    fn parse(text: &str) -> Result<Self, Error> {
        let mut spec = Self::default();
        let mut chars = text.chars().peekable();
        let is_align = |c: &char| "<>^=".contains(*c);
        if text.chars().nth(1).is_some_and(|c| is_align(&c)) {
            spec.fill = chars.next();
        }
        spec.align = chars.next_if(is_align);
        spec.sign = chars.next_if(|c| "+- ".contains(*c));
        spec.alternate = chars.next_if_eq(&'#').is_some();
        if chars.next_if_eq(&'0').is_some() {
            spec.fill.get_or_insert('0');
            spec.align.get_or_insert('=');
        }
        let digits = |chars: &mut std::iter::Peekable<std::str::Chars<'_>>| {
            let mut digits = String::new();
            while let Some(digit) = chars.next_if(char::is_ascii_digit) {
                digits.push(digit);
            }
            digits.parse().ok()
        };
        spec.width = digits(&mut chars).unwrap_or(0);
        spec.group = chars.next_if(|c| ",_".contains(*c));
        if chars.next_if_eq(&'.').is_some() {
            spec.precision = digits(&mut chars);
        }
        spec.kind = chars.next();
        match chars.next() {
            None => Ok(spec),
            Some(_) => Err(Error::new(format!("Invalid format specifier '{text}'"))),
        }
    }

    fn pad(&self, sign: &str, body: &str, align: char) -> Result<String, Error> {
        if self.width > WIDTH_MAX {
            return Err(Error::new(format!(
                "a field of more than {WIDTH_MAX} characters"
            )));
        }
        let length = sign.chars().count() + body.chars().count();
        let missing = self.width.saturating_sub(length);
        let fill = |count| self.fill.unwrap_or(' ').to_string().repeat(count);
        Ok(match self.align.unwrap_or(align) {
            '<' => format!("{sign}{body}{}", fill(missing)),
            '^' => format!(
                "{}{sign}{body}{}",
                fill(missing / 2),
                fill(missing - missing / 2)
            ),
            '=' => format!("{sign}{}{body}", fill(missing)),
            _ => format!("{}{sign}{body}", fill(missing)),
        })
    }

    fn text(&self, text: &str) -> Result<String, Error> {
        let cut: String = match self.precision {
            None => text.into(),
            Some(length) => text.chars().take(length).collect(),
        };
        self.pad("", &cut, '<')
    }

    fn number(&self, value: &Value) -> Result<String, Error> {
        if self.precision.is_some_and(|precision| precision > 1000) {
            return Err(Error::new("precision too big"));
        }
        let whole = python::as_int(value).filter(|_| {
            matches!(
                self.kind,
                None | Some('d' | 'x' | 'X' | 'o' | 'b' | 'c' | 'n')
            )
        });
        let (negative, body) = match (whole, value) {
            (Some(number), _) => {
                let size = number.unsigned_abs();
                let (prefix, digits) = match self.kind {
                    Some('x') => ("0x", format!("{size:x}")),
                    Some('X') => ("0X", format!("{size:X}")),
                    Some('o') => ("0o", format!("{size:o}")),
                    Some('b') => ("0b", format!("{size:b}")),
                    Some('c') => {
                        let c = u32::try_from(size).ok().and_then(char::from_u32);
                        return self.text(&c.map(String::from).unwrap_or_default());
                    }
                    _ => (
                        "",
                        format!("{size:0>width$}", width = self.precision.unwrap_or(0)),
                    ),
                };
                let prefix = if self.alternate { prefix } else { "" };
                (number < 0, format!("{prefix}{}", self.grouped(&digits)))
            }
            (None, value) => {
                let Some(number) = python::as_f64(value) else {
                    return Err(Error::new("not a number"));
                };
                let text = self.float(number.abs())?;
                (number.is_sign_negative() && !number.is_nan(), text)
            }
        };
        let sign = match (negative, self.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            _ => "",
        };
        self.pad(sign, &body, '>')
    }

    fn float(&self, number: f64) -> Result<String, Error> {
        let precision = self.precision.unwrap_or(6);
        if !number.is_finite() {
            let text = if number.is_nan() { "nan" } else { "inf" };
            return Ok(match self.kind {
                Some('F' | 'E' | 'G') => text.to_uppercase(),
                _ => text.into(),
            });
        }
        Ok(match self.kind {
            Some('f' | 'F') => self.grouped(&format!("{number:.precision$}")),
            Some('%') => format!("{:.precision$}%", number * 100.0),
            Some('e') => scientific(number, precision),
            Some('E') => scientific(number, precision).to_uppercase(),
            Some('g' | 'n') => general(number, precision.max(1), self.alternate),
            Some('G') => general(number, precision.max(1), self.alternate).to_uppercase(),
            None => match self.precision {
                None => self.grouped(&python::float(number)),
                Some(precision) => {
                    let text = general(number, precision.max(1), false);
                    match text.contains(['.', 'e']) {
                        true => text,
                        false => text + ".0",
                    }
                }
            },
            Some(kind) => {
                return Err(Error::new(format!(
                    "Unknown format code '{kind}' for object of type 'float'"
                )));
            }
        })
    }

    /// Puts separators between thousands.
    fn grouped(&self, number: &str) -> String {
        let Some(separator) = self.group else {
            return number.into();
        };
        let end = number.find(['.', 'e']).unwrap_or(number.len());
        let (whole, rest) = number.split_at(end);
        let mut out = String::new();
        for (at, digit) in whole.chars().enumerate() {
            if at > 0 && (whole.len() - at) % 3 == 0 {
                out.push(separator);
            }
            out.push(digit);
        }
        out + rest
    }
}

fn scientific(number: f64, precision: usize) -> String {
    let text = format!("{number:.precision$e}");
    let (digits, exponent) = text.split_once('e').expect("it has an exponent");
    let exponent: i32 = exponent.parse().expect("an exponent is a number");
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// The format `g`: `precision` digits, with an exponent where that is shorter.
fn general(number: f64, precision: usize, keep_zeros: bool) -> String {
    let text = scientific(number, precision - 1);
    let (digits, exponent) = text.split_once('e').expect("it has an exponent");
    let exponent: i32 = exponent.parse().expect("an exponent is a number");
    let trimmed = |text: &str| match text.contains('.') && !keep_zeros {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if exponent < -4 || exponent >= precision as i32 {
        let after = &text[digits.len()..];
        return trimmed(digits) + after;
    }
    let decimals = (precision as i32 - 1 - exponent).max(0) as usize;
    trimmed(&format!("{number:.decimals$}"))
}
