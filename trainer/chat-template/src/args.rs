//! Arguments of functions, filters and methods.

use crate::{Error, Value};

/// Arguments of a call.
#[derive(Clone, Default)]
pub(crate) struct Arguments {
    pub(crate) positional: Vec<Value>,
    pub(crate) keywords: Vec<(String, Value)>,
}

impl Arguments {
    /// Takes a keyword argument out.
    pub(crate) fn remove_keyword(&mut self, name: &str) -> Option<Value> {
        let at = self.keywords.iter().position(|(found, _)| found == name)?;
        Some(self.keywords.remove(at).1)
    }

    /// Returns the arguments of `function` in the order of its parameters.
    pub(crate) fn bind<const N: usize>(
        self,
        function: &str,
        names: [&str; N],
    ) -> Result<[Option<Value>; N], Error> {
        if self.positional.len() > N {
            return Err(Error::new(format!(
                "{function}() takes at most {N} arguments, but {} were given",
                self.positional.len()
            )));
        }
        let mut bound = [const { None }; N];
        let given = self.positional.len();
        for (place, value) in bound.iter_mut().zip(self.positional) {
            *place = Some(value);
        }
        for (name, value) in self.keywords {
            match names.iter().position(|known| *known == name) {
                Some(at) if at >= given => bound[at] = Some(value),
                Some(_) => {
                    return Err(Error::new(format!(
                        "{function}() got multiple values for argument '{name}'"
                    )));
                }
                None => {
                    return Err(Error::new(format!(
                        "{function}() got an unexpected keyword argument '{name}'"
                    )));
                }
            }
        }
        Ok(bound)
    }
}

/// Returns an integer argument, or its default.
pub(crate) fn int(value: Option<Value>, default: i128) -> Result<i128, Error> {
    match value {
        None => Ok(default),
        Some(value) => crate::python::as_int(&value).ok_or_else(|| {
            Error::new(format!(
                "'{}' object cannot be interpreted as an integer",
                crate::python::type_name(&value)
            ))
        }),
    }
}

/// Returns whether an argument is given and true.
pub(crate) fn truth(value: Option<Value>) -> bool {
    value.is_some_and(|value| crate::python::is_true(&value))
}

/// Returns a text argument; `None` for none.
pub(crate) fn text(value: Option<Value>, function: &str) -> Result<Option<String>, Error> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(Value::Str(text)) => Ok(Some(text.to_string())),
        Some(other) => Err(Error::new(format!(
            "{function}() argument must be str, not {}",
            crate::python::type_name(&other)
        ))),
    }
}

/// Returns an argument that must be given.
pub(crate) fn required(value: Option<Value>, function: &str, name: &str) -> Result<Value, Error> {
    value.ok_or_else(|| {
        Error::new(format!(
            "{function}() missing 1 required positional argument: '{name}'"
        ))
    })
}
