//! Parses the tokens of a template. The grammar is that of jinja2's own parser, with the loop controls and the `generation` block
//! of transformers.

use std::iter::Peekable;
use std::sync::Arc;
use std::vec::IntoIter;

use crate::ast::{Args, Body, Expr, Filter, For, Macro, Node, Statement, Target};
use crate::lexer::{Token, TokenKind, tokens};
use crate::{Error, Value};

/// Expressions and blocks within each other; more than a template written by people has.
const DEPTH_MAX: usize = 100;

/// Parses a template. Also returns whether it has a `generation` block.
pub(crate) fn parse(source: &str) -> Result<(Body, bool), Error> {
    let mut parser = Parser {
        line: 1,
        depth: 0,
        generation: false,
        loops: 0,
        names: Vec::new(),
        tokens: tokens(source)?.into_iter().peekable(),
        ahead: None,
    };
    let body = parser.body(&[])?;
    match parser.peek() {
        None => Ok((body, parser.generation)),
        Some(_) => unreachable!("without an end the whole template is the body"),
    }
}

struct Parser {
    tokens: Peekable<IntoIter<Token>>,
    /// A token that was taken to look behind it.
    ahead: Option<Token>,
    /// Line of the current token.
    line: usize,
    depth: usize,
    generation: bool,
    /// Loops around the current statement.
    loops: usize,
    /// Names used so far.
    names: Vec<String>,
}

type ParseResult<T> = Result<T, Error>;

impl Parser {
    fn peek(&mut self) -> Option<&TokenKind> {
        match &self.ahead {
            Some(token) => Some(&token.kind),
            None => self.tokens.peek().map(|token| &token.kind),
        }
    }

    fn next(&mut self) -> Option<TokenKind> {
        let token = self.ahead.take().or_else(|| self.tokens.next())?;
        self.line = token.line;
        Some(token.kind)
    }

    fn fail<T>(&self, message: impl Into<String>) -> ParseResult<T> {
        Err(Error::new(message).at(self.line))
    }

    fn unexpected<T>(&mut self, wanted: &str) -> ParseResult<T> {
        let found = match self.next() {
            None => "the template ends".into(),
            Some(TokenKind::Name(name)) => format!("found \"{name}\""),
            Some(TokenKind::Op(op)) => format!("found \"{op}\""),
            Some(TokenKind::BlockEnd) => "found \"%}\"".into(),
            Some(TokenKind::VariableEnd) => "found \"}}\"".into(),
            Some(other) => format!("found {other:?}"),
        };
        self.fail(format!("expected {wanted}, but {found}"))
    }

    fn is_op(&mut self, op: &str) -> bool {
        matches!(self.peek(), Some(TokenKind::Op(found)) if *found == op)
    }

    fn is_name(&mut self, name: &str) -> bool {
        matches!(self.peek(), Some(TokenKind::Name(found)) if found == name)
    }

    fn skip_op(&mut self, op: &str) -> bool {
        let found = self.is_op(op);
        if found {
            self.next();
        }
        found
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.next();
        }
        found
    }

    fn expect_op(&mut self, op: &str) -> ParseResult<()> {
        match self.skip_op(op) {
            true => Ok(()),
            false => self.unexpected(&format!("\"{op}\"")),
        }
    }

    fn expect_name(&mut self, name: &str) -> ParseResult<()> {
        match self.skip_name(name) {
            true => Ok(()),
            false => self.unexpected(&format!("\"{name}\"")),
        }
    }

    fn name(&mut self) -> ParseResult<String> {
        match self.peek() {
            Some(TokenKind::Name(name)) => {
                let name = name.clone();
                self.next();
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn block_end(&mut self) -> ParseResult<()> {
        match self.peek() {
            Some(TokenKind::BlockEnd) => {
                self.next();
                Ok(())
            }
            _ => self.unexpected("\"%}\""),
        }
    }

    /// Runs `parse` one level deeper.
    fn deeper<T>(&mut self, parse: impl FnOnce(&mut Self) -> ParseResult<T>) -> ParseResult<T> {
        if self.depth == DEPTH_MAX {
            return self.fail(format!("nested more than {DEPTH_MAX} deep"));
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    /// Parses statements up to a tag of `ends`, whose name is the next token then.
    fn body(&mut self, ends: &[&str]) -> ParseResult<Body> {
        let mut body = Vec::new();
        loop {
            let Some(token) = self.next() else {
                return match ends {
                    [] => Ok(body),
                    _ => self.fail(format!("the template ends without {{% {} %}}", ends[0])),
                };
            };
            let line = self.line;
            let statement = match token {
                TokenKind::Data(text) => Statement::Text(text),
                TokenKind::VariableBegin => {
                    let printed = self.tuple(&[])?;
                    if self.next() != Some(TokenKind::VariableEnd) {
                        return self.fail("an expression does not end with \"}}\"");
                    }
                    Statement::Print(printed)
                }
                TokenKind::BlockBegin => {
                    if ends.iter().any(|end| self.is_name(end)) {
                        return Ok(body);
                    }
                    let tag = self.name()?;
                    let statements = self.deeper(|parser| parser.statement(&tag))?;
                    self.block_end()?;
                    let nodes = statements.into_iter();
                    body.extend(nodes.map(|statement| Node { line, statement }));
                    continue;
                }
                _ => unreachable!("the lexer begins tags before what is in them"),
            };
            body.push(Node { line, statement });
        }
    }

    /// Parses the body of a tag, and the name of its end.
    fn body_until(&mut self, end: &str) -> ParseResult<Body> {
        self.begin_body()?;
        let body = self.body(&[end])?;
        self.next();
        Ok(body)
    }

    fn begin_body(&mut self) -> ParseResult<()> {
        self.skip_op(":");
        self.block_end()
    }

    fn statement(&mut self, tag: &str) -> ParseResult<Vec<Statement>> {
        Ok(vec![match tag {
            "if" => self.conditions()?,
            "for" => self.for_loop()?,
            "set" => self.set()?,
            "with" => self.with()?,
            "macro" => {
                let name = self.name()?;
                Statement::Macro(Arc::new(self.signature(name, "endmacro", true)?.0))
            }
            "call" => self.call_block()?,
            "filter" => {
                let first = self.filter()?;
                let mut filters = vec![first];
                filters.extend(self.filters()?);
                Statement::FilterBlock(filters, self.body_until("endfilter")?)
            }
            "generation" => {
                self.generation = true;
                Statement::Generation(self.body_until("endgeneration")?)
            }
            "block" => {
                let name = self.name()?;
                self.skip_name("scoped");
                let body = self.body_until("endblock")?;
                self.skip_name(&name);
                Statement::Block(body)
            }
            "print" => {
                let mut printed = Vec::new();
                while self.peek() != Some(&TokenKind::BlockEnd) {
                    if !printed.is_empty() {
                        self.expect_op(",")?;
                    }
                    printed.push(Statement::Print(self.expression()?));
                }
                return Ok(printed);
            }
            "break" | "continue" if self.loops == 0 => {
                return self.fail(format!("\"{tag}\" outside of a loop"));
            }
            "break" => Statement::Break,
            "continue" => Statement::Continue,
            _ => {
                return self.fail(format!(
                    "unknown tag \"{tag}\": transformers has no such tag either, or no templates to include"
                ));
            }
        }])
    }

    fn conditions(&mut self) -> ParseResult<Statement> {
        let mut branches = Vec::new();
        loop {
            let condition = self.tuple_of(&[], false)?;
            self.begin_body()?;
            branches.push((condition, self.body(&["elif", "else", "endif"])?));
            match self.name()?.as_str() {
                "elif" => {}
                "else" => {
                    let otherwise = self.body_until("endif")?;
                    return Ok(Statement::If(branches, otherwise));
                }
                _ => return Ok(Statement::If(branches, Vec::new())),
            }
        }
    }

    fn for_loop(&mut self) -> ParseResult<Statement> {
        let target = self.target(&["in"])?;
        self.expect_name("in")?;
        let items = self.tuple_of(&["recursive"], false)?;
        let test = match self.skip_name("if") {
            true => Some(self.expression()?),
            false => None,
        };
        let recursive = self.skip_name("recursive");
        self.begin_body()?;
        self.loops += 1;
        let body = self.body(&["endfor", "else"])?;
        self.loops -= 1;
        let otherwise = match self.name()?.as_str() {
            "else" => self.body_until("endfor")?,
            _ => Vec::new(),
        };
        Ok(Statement::For(Arc::new(For {
            target,
            items,
            test,
            body,
            otherwise,
            recursive,
        })))
    }

    fn set(&mut self) -> ParseResult<Statement> {
        let target = self.target(&[])?;
        if self.skip_op("=") {
            return Ok(Statement::Set(target, self.tuple(&[])?));
        }
        let filters = self.filters()?;
        Ok(Statement::SetBlock(
            target,
            filters,
            self.body_until("endset")?,
        ))
    }

    fn with(&mut self) -> ParseResult<Statement> {
        let mut values = Vec::new();
        while !self.is_op(":") && self.peek() != Some(&TokenKind::BlockEnd) {
            if !values.is_empty() {
                self.expect_op(",")?;
            }
            // A tuple needs parentheses here.
            let target = self.target_of_one()?;
            self.expect_op("=")?;
            values.push((target, self.expression()?));
        }
        Ok(Statement::With(values, self.body_until("endwith")?))
    }

    fn call_block(&mut self) -> ParseResult<Statement> {
        let (mut caller, call) = match self.is_op("(") {
            true => self.signature("caller".into(), "endcall", false)?,
            false => {
                let call = self.expression()?;
                let body = self.body_of_macro("endcall")?;
                (with_body("caller".into(), Vec::new(), body), Some(call))
            }
        };
        caller.caller = false;
        match call {
            Some(call @ Expr::Call(..)) => Ok(Statement::Call(call, Arc::new(caller))),
            _ => self.fail("\"call\" needs a call of a macro"),
        }
    }

    /// Parses parameters and the body of a macro, or of a `call` block, whose call stands between them.
    fn signature(
        &mut self,
        name: String,
        end: &str,
        is_macro: bool,
    ) -> ParseResult<(Macro, Option<Expr>)> {
        self.expect_op("(")?;
        let mut params: Vec<(String, Option<Expr>)> = Vec::new();
        while !self.skip_op(")") {
            if !params.is_empty() {
                self.expect_op(",")?;
            }
            let param = self.name()?;
            let default = match self.skip_op("=") {
                true => Some(self.expression()?),
                false if params.iter().any(|(_, default)| default.is_some()) => {
                    return self.fail("a parameter without default follows one with a default");
                }
                false => None,
            };
            params.push((param, default));
        }
        let call = match is_macro {
            true => None,
            false => Some(self.expression()?),
        };
        let body = self.body_of_macro(end)?;
        Ok((with_body(name, params, body), call))
    }

    /// Parses the body of a macro. Also returns the names that it uses.
    fn body_of_macro(&mut self, end: &str) -> ParseResult<(Body, Vec<String>)> {
        let outer = std::mem::take(&mut self.names);
        let loops = std::mem::take(&mut self.loops);
        let body = self.body_until(end)?;
        self.loops = loops;
        let used = std::mem::replace(&mut self.names, outer);
        self.names.extend(used.iter().cloned());
        Ok((body, used))
    }

    /// Parses what a statement assigns to.
    fn target(&mut self, ends: &[&str]) -> ParseResult<Target> {
        let first = self.target_of_one()?;
        if !self.is_op(",") {
            return Ok(first);
        }
        let mut targets = vec![first];
        while self.skip_op(",") {
            if self.is_op("=") || ends.iter().any(|end| self.is_name(end)) {
                break;
            }
            targets.push(self.target_of_one()?);
        }
        Ok(Target::Tuple(targets))
    }

    fn target_of_one(&mut self) -> ParseResult<Target> {
        if self.skip_op("(") {
            let target = self.deeper(|parser| parser.target(&[]))?;
            self.expect_op(")")?;
            return Ok(target);
        }
        let name = self.name()?;
        if self.skip_op(".") {
            return Ok(Target::Attr(name, self.name()?));
        }
        match name.as_str() {
            "true" | "false" | "none" | "True" | "False" | "None" => {
                self.fail(format!("\"{name}\" cannot be assigned to"))
            }
            _ => Ok(Target::Name(name)),
        }
    }

    /// Parses an expression, or several with commas between them.
    fn tuple(&mut self, ends: &[&str]) -> ParseResult<Expr> {
        self.tuple_of(ends, true)
    }

    fn tuple_of(&mut self, ends: &[&str], conditional: bool) -> ParseResult<Expr> {
        let mut items = Vec::new();
        loop {
            if self.is_tuple_end(ends) && !items.is_empty() {
                return Ok(Expr::Tuple(items));
            }
            let item = match conditional {
                true => self.expression()?,
                false => self.deeper(Self::or)?,
            };
            if !self.skip_op(",") {
                if items.is_empty() {
                    return Ok(item);
                }
                items.push(item);
                return Ok(Expr::Tuple(items));
            }
            items.push(item);
        }
    }

    fn is_tuple_end(&mut self, ends: &[&str]) -> bool {
        match self.peek() {
            Some(TokenKind::BlockEnd | TokenKind::VariableEnd) => true,
            Some(TokenKind::Op(")")) => true,
            _ => ends.iter().any(|end| self.is_name(end)),
        }
    }

    fn expression(&mut self) -> ParseResult<Expr> {
        self.deeper(|parser| {
            let mut value = parser.or()?;
            while parser.skip_name("if") {
                let condition = parser.or()?;
                let otherwise = match parser.skip_name("else") {
                    true => Some(Box::new(parser.expression()?)),
                    false => None,
                };
                value = Expr::If(Box::new(condition), Box::new(value), otherwise);
            }
            Ok(value)
        })
    }

    fn or(&mut self) -> ParseResult<Expr> {
        let mut left = self.and()?;
        while self.skip_name("or") {
            left = Expr::Or(Box::new(left), Box::new(self.and()?));
        }
        Ok(left)
    }

    fn and(&mut self) -> ParseResult<Expr> {
        let mut left = self.not()?;
        while self.skip_name("and") {
            left = Expr::And(Box::new(left), Box::new(self.not()?));
        }
        Ok(left)
    }

    fn not(&mut self) -> ParseResult<Expr> {
        if self.skip_name("not") {
            let value = self.deeper(Self::not)?;
            return Ok(Expr::Not(Box::new(value)));
        }
        self.compare()
    }

    fn compare(&mut self) -> ParseResult<Expr> {
        let left = self.sum()?;
        let mut others = Vec::new();
        loop {
            let is_ahead = self.ahead.is_some();
            let op = match self.peek() {
                Some(TokenKind::Op(op @ ("==" | "!=" | "<" | "<=" | ">" | ">="))) => *op,
                Some(TokenKind::Name(name)) if name == "in" => "in",
                Some(TokenKind::Name(name)) if name == "not" && !is_ahead => {
                    let not = self.tokens.next();
                    if !matches!(self.tokens.peek(), Some(Token { kind: TokenKind::Name(name), .. }) if name == "in")
                    {
                        self.ahead = not;
                        break;
                    }
                    "not in"
                }
                _ => break,
            };
            self.next();
            others.push((op, self.sum()?));
        }
        Ok(match others.is_empty() {
            true => left,
            false => Expr::Compare(Box::new(left), others),
        })
    }

    /// Parses operators of one precedence.
    fn binary(
        &mut self,
        operators: &[&'static str],
        operand: impl Fn(&mut Self) -> ParseResult<Expr>,
    ) -> ParseResult<Expr> {
        let mut left = operand(self)?;
        while let Some(op) = operators.iter().find(|op| self.is_op(op)) {
            self.next();
            left = Expr::Binary(op, Box::new(left), Box::new(operand(self)?));
        }
        Ok(left)
    }

    fn sum(&mut self) -> ParseResult<Expr> {
        self.binary(&["+", "-"], Self::concat)
    }

    fn concat(&mut self) -> ParseResult<Expr> {
        let first = self.product()?;
        if !self.is_op("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_op("~") {
            parts.push(self.product()?);
        }
        Ok(Expr::Concat(parts))
    }

    fn product(&mut self) -> ParseResult<Expr> {
        self.binary(&["*", "/", "//", "%"], |parser| {
            parser.binary(&["**"], |parser| parser.unary(true))
        })
    }

    fn unary(&mut self, with_filter: bool) -> ParseResult<Expr> {
        let value = if self.skip_op("-") {
            Expr::Neg(Box::new(self.deeper(|parser| parser.unary(false))?))
        } else if self.skip_op("+") {
            Expr::Pos(Box::new(self.deeper(|parser| parser.unary(false))?))
        } else {
            self.primary()?
        };
        let value = self.postfix(value)?;
        match with_filter {
            true => self.filtered(value),
            false => Ok(value),
        }
    }

    fn primary(&mut self) -> ParseResult<Expr> {
        match self.peek() {
            Some(
                TokenKind::Name(_) | TokenKind::Str(_) | TokenKind::Int(_) | TokenKind::Float(_),
            )
            | Some(TokenKind::Op("(" | "[" | "{")) => {}
            _ => return self.unexpected("an expression"),
        }
        Ok(match self.next().expect("it was looked at") {
            TokenKind::Name(name) => match name.as_str() {
                "true" | "True" => Expr::Const(true.into()),
                "false" | "False" => Expr::Const(false.into()),
                "none" | "None" => Expr::Const(Value::None),
                _ => {
                    self.names.push(name.clone());
                    Expr::Name(name)
                }
            },
            TokenKind::Str(mut text) => {
                while let Some(TokenKind::Str(more)) = self.peek() {
                    text += more;
                    self.next();
                }
                Expr::Const(text.into())
            }
            TokenKind::Int(number) => Expr::Const(number.into()),
            TokenKind::Float(number) => Expr::Const(number.into()),
            TokenKind::Op("(") => {
                let inner = match self.is_op(")") {
                    true => Expr::Tuple(Vec::new()),
                    false => self.tuple(&[])?,
                };
                self.expect_op(")")?;
                inner
            }
            TokenKind::Op("[") => Expr::List(self.elements("]", Self::expression)?),
            _ => Expr::Dict(self.elements("}", |parser| {
                let key = parser.expression()?;
                parser.expect_op(":")?;
                Ok((key, parser.expression()?))
            })?),
        })
    }

    /// Parses elements with commas between them, and what ends them.
    fn elements<T>(
        &mut self,
        end: &str,
        element: impl Fn(&mut Self) -> ParseResult<T>,
    ) -> ParseResult<Vec<T>> {
        let mut elements = Vec::new();
        while !self.skip_op(end) {
            if !elements.is_empty() {
                self.expect_op(",")?;
                if self.skip_op(end) {
                    break;
                }
            }
            elements.push(element(self)?);
        }
        Ok(elements)
    }

    fn postfix(&mut self, mut value: Expr) -> ParseResult<Expr> {
        loop {
            value = if self.skip_op(".") {
                match self.next() {
                    Some(TokenKind::Name(name)) => Expr::Attr(Box::new(value), name),
                    Some(TokenKind::Int(number)) => {
                        Expr::Item(Box::new(value), Box::new(Expr::Const(number.into())))
                    }
                    _ => return self.fail("expected a name or a number after \".\""),
                }
            } else if self.skip_op("[") {
                self.subscript(value)?
            } else if self.is_op("(") {
                Expr::Call(Box::new(value), self.args()?)
            } else {
                return Ok(value);
            };
        }
    }

    fn subscript(&mut self, value: Expr) -> ParseResult<Expr> {
        let part = |parser: &mut Self| -> ParseResult<Option<Box<Expr>>> {
            match parser.is_op(":") || parser.is_op("]") {
                true => Ok(None),
                false => Ok(Some(Box::new(parser.expression()?))),
            }
        };
        let first = part(self)?;
        if self.skip_op(":") {
            let second = part(self)?;
            let third = match self.skip_op(":") {
                true => part(self)?,
                false => None,
            };
            self.expect_op("]")?;
            return Ok(Expr::Slice(Box::new(value), [first, second, third]));
        }
        let Some(first) = first else {
            return self.unexpected("an index");
        };
        let mut items = vec![*first];
        while self.skip_op(",") {
            items.push(self.expression()?);
        }
        self.expect_op("]")?;
        let index = match items.len() {
            1 => items.remove(0),
            _ => Expr::Tuple(items),
        };
        Ok(Expr::Item(Box::new(value), Box::new(index)))
    }

    /// Parses filters, tests and calls behind an expression.
    fn filtered(&mut self, mut value: Expr) -> ParseResult<Expr> {
        loop {
            value = if self.skip_op("|") {
                let filter = self.filter()?;
                Expr::Filter(Box::new(value), filter)
            } else if self.skip_name("is") {
                self.test(value)?
            } else if self.is_op("(") {
                Expr::Call(Box::new(value), self.args()?)
            } else {
                return Ok(value);
            };
        }
    }

    fn filters(&mut self) -> ParseResult<Vec<Filter>> {
        let mut filters = Vec::new();
        while self.skip_op("|") {
            filters.push(self.filter()?);
        }
        Ok(filters)
    }

    fn filter(&mut self) -> ParseResult<Filter> {
        let mut name = self.name()?;
        while self.skip_op(".") {
            name = format!("{name}.{}", self.name()?);
        }
        let args = match self.is_op("(") {
            true => self.args()?,
            false => Args::default(),
        };
        Ok(Filter { name, args })
    }

    fn test(&mut self, value: Expr) -> ParseResult<Expr> {
        let negated = self.skip_name("not");
        let name = self.name()?;
        let args = if self.is_op("(") {
            self.args()?
        } else {
            let has_argument = match self.peek() {
                Some(TokenKind::Name(name)) => !matches!(name.as_str(), "else" | "or" | "and"),
                Some(TokenKind::Str(_) | TokenKind::Int(_) | TokenKind::Float(_)) => true,
                Some(TokenKind::Op("[" | "{")) => true,
                _ => false,
            };
            match has_argument {
                true if self.is_name("is") => {
                    return self.fail("a test cannot follow a test");
                }
                true => {
                    let argument = self.primary()?;
                    Args {
                        positional: vec![self.postfix(argument)?],
                        ..Args::default()
                    }
                }
                false => Args::default(),
            }
        };
        Ok(Expr::Test(Box::new(value), Filter { name, args }, negated))
    }

    fn args(&mut self) -> ParseResult<Args> {
        self.deeper(|parser| {
            parser.expect_op("(")?;
            let mut args = Args::default();
            let mut first = true;
            while !parser.skip_op(")") {
                if !std::mem::take(&mut first) {
                    parser.expect_op(",")?;
                    if parser.skip_op(")") {
                        break;
                    }
                }
                if parser.skip_op("*") {
                    args.star = Some(Box::new(parser.expression()?));
                    continue;
                }
                if parser.skip_op("**") {
                    args.double_star = Some(Box::new(parser.expression()?));
                    continue;
                }
                match parser.expression()? {
                    Expr::Name(name) if parser.skip_op("=") => {
                        parser.names.pop();
                        args.keywords.push((name, parser.expression()?));
                    }
                    _ if !args.keywords.is_empty() => {
                        return parser.fail("an argument without name follows one with a name");
                    }
                    value => args.positional.push(value),
                }
            }
            Ok(args)
        })
    }
}

fn with_body(
    name: String,
    params: Vec<(String, Option<Expr>)>,
    (body, used): (Body, Vec<String>),
) -> Macro {
    let uses = |name: &str| {
        let is_param = params.iter().any(|(param, _)| param == name);
        !is_param && used.iter().any(|used| used == name)
    };
    Macro {
        caller: uses("caller"),
        kwargs: uses("kwargs"),
        varargs: uses("varargs"),
        name,
        params,
        body,
    }
}
