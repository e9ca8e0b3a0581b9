//! Compares what templates become with what transformers makes of them (`tests/fixtures/make.py`).

use chat_template::{Map, Template, Value};
use serde_json::Value as Json;

const FIXTURE: &str = include_str!("fixtures/expected.json");

fn values() -> Map {
    #[derive(serde::Deserialize)]
    struct Fixture {
        values: Value,
    }
    let fixture: Fixture = serde_json::from_str(FIXTURE).unwrap();
    fixture.values.as_map().unwrap().clone()
}

/// Renders a template; parts are counted in characters, as in Python.
fn rendered(source: &str, values: &Map) -> Result<(String, Vec<(usize, usize)>), String> {
    let template = Template::parse(source).map_err(|error| error.to_string())?;
    let found = template.render(values).map_err(|error| error.to_string())?;
    let chars = |bytes: usize| found.text[..bytes].chars().count();
    let parts = found.generated.iter();
    let parts = parts.map(|part| (chars(part.start), chars(part.end)));
    Ok((found.text.clone(), parts.collect()))
}

#[test]
fn templates_become_what_transformers_makes_of_them() {
    let fixture: Json = serde_json::from_str(FIXTURE).unwrap();
    let values = values();
    let cases = fixture["cases"].as_array().unwrap();
    assert!(cases.len() > 500, "{}", cases.len());
    let mut wrong = Vec::new();
    for case in cases {
        let template = case["template"].as_str().unwrap();
        let found = rendered(template, &values);
        let expected = case["text"].as_str().map(|text| {
            let parts = case["parts"].as_array().unwrap().iter();
            let at = |part: &Json, end: usize| part[end].as_u64().unwrap() as usize;
            let parts = parts.map(|part| (at(part, 0), at(part, 1)));
            (text.to_owned(), parts.collect::<Vec<_>>())
        });
        if found.as_ref().ok() != expected.as_ref() {
            let error = &case["error"];
            wrong.push(format!(
                "{template}\n  transformers: {expected:?} {error}\n  here:         {found:?}"
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
