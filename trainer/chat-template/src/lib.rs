//! Renders chat templates as transformers does: Jinja, with Python's values, in transformers' sandbox.
//!
//! ```text
//!   source ─▶ lexer ─▶ parser ─▶ ast ─▶ render: statements, expressions ─▶ text, and the parts that the assistant says
//!                                          │
//!                                          ├─ filters, predicates (tests), functions, methods
//!                                          └─ python (operators, repr), format (%, str.format), json ─▶ Value
//! ```
//!
//! Published templates rely on details of Python: how a float is printed, what an undefined value does, which attribute hides
//! which key. A table of expressions (`tests/fixtures`) is compared with what jinja2 answers, as transformers sets it up. A
//! filter that is not here is refused by name. A template that runs too long, nests too deeply or makes too long a text ends with an error.

mod args;
mod ast;
mod error;
mod expressions;
mod filters;
mod format;
mod functions;
mod json;
mod lexer;
mod methods;
mod object;
mod parser;
mod predicates;
mod python;
mod render;
mod value;

use std::ops::Range;

pub use error::Error;
pub use value::{Map, Value};

/// A parsed template.
pub struct Template {
    body: ast::Body,
    generation: bool,
}

/// What a template makes of its values.
#[derive(Clone, Debug, PartialEq)]
pub struct RenderedText {
    pub text: String,
    /// Bytes of the text that are in `{% generation %}` blocks.
    pub generated: Vec<Range<usize>>,
}

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    /// The text is not a template.
    pub fn parse(source: &str) -> Result<Self, Error> {
        let (body, generation) = parser::parse(source)?;
        Ok(Self { body, generation })
    }

    /// Returns whether the template marks the assistant's part with `{% generation %}`.
    pub fn has_generation(&self) -> bool {
        self.generation
    }

    /// Renders the template with the given variables.
    ///
    /// # Errors
    /// The template raises an error, uses a value in a way that Python refuses, or does not end.
    pub fn render(&self, values: &Map) -> Result<RenderedText, Error> {
        render::render(&self.body, values)
    }
}
