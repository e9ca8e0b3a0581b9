//! The table as Markdown: `trainer keys --markdown` prints it, `configs/DEEPSPEED.md` is it.

use std::fmt::Write;

use super::table::{Fate, Key, SECTIONS};
use crate::config::auto::AUTO;

const HEAD: &str = "# DeepSpeed's keys, and what becomes of them

Made by `trainer keys --markdown`; a test holds it to the program. `trainer train RUN.toml --deepspeed ds_config.json` reads the JSON as
it is: comments, trailing commas, numbers such as 5e8 included. Keys that are used mean what they mean in DeepSpeed. Keys without effect
are accepted and named before the start. What is refused asks for something that is not here; switched off (false, null, `enabled` false) it
is accepted, too. A key that is not in these tables is an error that names the nearest one.
";

/// Every key of DeepSpeed's, as the file in `configs/` has it.
pub fn markdown() -> String {
    let mut text = HEAD.to_owned();
    for (title, keys) in SECTIONS {
        let _ = write!(
            text,
            "\n## {title}\n\n| key | what becomes of it | |\n|---|---|---|\n"
        );
        for key in *keys {
            let fate = match key.fate {
                Fate::Used => "used".to_owned(),
                Fate::Unused => "without effect".to_owned(),
                Fate::Refused => "refused".to_owned(),
                Fate::RefusedBut(values) => format!("refused unless {}", values.join(" or ")),
            };
            let _ = writeln!(text, "| {} | {fate} | {} |", names(key), key.why);
        }
    }
    text += "\n## \"auto\"\n
A value of the run file or of `--set` takes the place of \"auto\". Where there is none, it is what Hugging Face's Trainer would fill in
without an argument of its own, and the choice is shown. Any other key that is \"auto\" is as good as left out.

| key | \"auto\" is |
|---|---|
";
    for (key, _, what) in AUTO {
        let _ = writeln!(text, "| `{key}` | {what} |");
    }
    text
}

fn names(key: &Key) -> String {
    match (key.below, key.below.contains(' ')) {
        ("", _) => format!("`{}`", key.path),
        ("*", _) => format!("`{}` and all below", key.path),
        (below, false) => format!("`{}.{below}`", key.path),
        (below, true) => {
            let names: Vec<String> = below.split(' ').map(|name| format!("`{name}`")).collect();
            format!("`{}`: {}", key.path, names.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_in_configs_is_the_programs() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/DEEPSPEED.md");
        let page = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            page == markdown(),
            "make it anew: trainer keys --markdown > configs/DEEPSPEED.md"
        );
    }
}
