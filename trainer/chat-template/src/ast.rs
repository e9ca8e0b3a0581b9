//! Parts of a parsed template.

use std::sync::Arc;

use crate::Value;

pub(crate) type Body = Vec<Node>;

/// A statement and its line.
pub(crate) struct Node {
    pub(crate) line: usize,
    pub(crate) statement: Statement,
}

pub(crate) enum Statement {
    Text(String),
    Print(Expr),
    /// Conditions with their bodies, and the body of `else`.
    If(Vec<(Expr, Body)>, Body),
    For(Arc<For>),
    Set(Target, Expr),
    SetBlock(Target, Vec<Filter>, Body),
    With(Vec<(Target, Expr)>, Body),
    Macro(Arc<Macro>),
    /// `{% call %}`: the call, and what its `caller` is.
    Call(Expr, Arc<Macro>),
    FilterBlock(Vec<Filter>, Body),
    /// Text of the assistant.
    Generation(Body),
    /// `{% block %}`, whose body sees the names of the whole template only.
    Block(Body),
    Break,
    Continue,
}

pub(crate) struct For {
    pub(crate) target: Target,
    pub(crate) items: Expr,
    pub(crate) test: Option<Expr>,
    pub(crate) body: Body,
    pub(crate) otherwise: Body,
    pub(crate) recursive: bool,
}

pub(crate) struct Macro {
    pub(crate) name: String,
    /// Parameters with their defaults.
    pub(crate) params: Vec<(String, Option<Expr>)>,
    pub(crate) body: Body,
    /// Whether its body uses `caller`, `kwargs` and `varargs`.
    pub(crate) caller: bool,
    pub(crate) kwargs: bool,
    pub(crate) varargs: bool,
}

pub(crate) enum Target {
    Name(String),
    /// Attribute of a namespace.
    Attr(String, String),
    Tuple(Vec<Target>),
}

pub(crate) struct Filter {
    pub(crate) name: String,
    pub(crate) args: Args,
}

#[derive(Default)]
pub(crate) struct Args {
    pub(crate) positional: Vec<Expr>,
    pub(crate) keywords: Vec<(String, Expr)>,
    pub(crate) star: Option<Box<Expr>>,
    pub(crate) double_star: Option<Box<Expr>>,
}

pub(crate) enum Expr {
    Const(Value),
    Name(String),
    Tuple(Vec<Expr>),
    List(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attr(Box<Expr>, String),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<Expr>, [Option<Box<Expr>>; 3]),
    Call(Box<Expr>, Args),
    Filter(Box<Expr>, Filter),
    /// A test, and whether it is negated.
    Test(Box<Expr>, Filter, bool),
    Neg(Box<Expr>),
    Pos(Box<Expr>),
    Not(Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Binary(&'static str, Box<Expr>, Box<Expr>),
    Concat(Vec<Expr>),
    Compare(Box<Expr>, Vec<(&'static str, Expr)>),
    If(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
}
