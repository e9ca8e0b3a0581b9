//! Checks a tree of settings against the tables of its reader.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::SettingsError;
use crate::keys;
use crate::reader::{Reader, Remarks};
use crate::schema::KeyType;

/// A tree of settings as the tables that its reader has, and the errors in it. What was wrong is left out of the tables.
pub struct ParsedSettings<T> {
    pub config: T,
    pub faults: Vec<SettingsError>,
    /// Keys without effect.
    pub without_effect: Vec<String>,
}

/// Checks every key of `tree` and its type. `said` receives what "auto" became, for the trainer.
pub fn parse<T: KeyType + DeserializeOwned>(
    mut tree: Value,
    reader: Reader,
    said: &mut Remarks,
) -> ParsedSettings<T> {
    whole_numbers(&mut tree);
    let keys::KeyFindings {
        note,
        without_effect,
        mut faults,
    } = keys::check(&tree, reader);
    match reader {
        Reader::Trainer => {
            said.notes.extend(note);
            keys::auto::resolve(&mut tree, &mut said.notes);
        }
        Reader::Package => keys::auto::leave_all_out(&mut tree),
    }
    faults.extend(keys::take_wrong_types(&mut tree, &T::KIND));
    let config = serde_json::from_value(tree).expect("every value is of a type that its key takes");
    ParsedSettings {
        config,
        faults,
        without_effect,
    }
}

/// Converts numbers such as 5e8 and 1000.0 to integers where they are whole. Leaves the model's keys alone,
/// which have their own parser.
fn whole_numbers(tree: &mut Value) {
    /// Up to this value every whole number is exactly one f64.
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
    match tree {
        Value::Number(number) if number.is_f64() => {
            let float = number.as_f64().unwrap_or(0.5);
            if float.fract() == 0.0 && (0.0..EXACT_MAX).contains(&float) {
                *tree = (float as u64).into();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(whole_numbers),
        Value::Object(table) => {
            let others = table.iter_mut().filter(|(key, _)| *key != "model");
            others.for_each(|(_, value)| whole_numbers(value));
        }
        _ => {}
    }
}
