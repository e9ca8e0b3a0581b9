//! Compares the documents with the programs. Only tests use this crate.
//!
//! - [`assert_page`]: compares a generated page with the repository. `make docs` writes all such pages.
//! - [`blocks`]: returns the code blocks of README.md and docs/, each with its place.
//! - [`assert_commands_parse`]: checks that a program accepts every shell line in the documents that calls it.
//! - [`assert_section`]: compares a part of a page, between two comments; [`mod@layout`] makes such parts from stored structs.
//! - [`mod@reference`]: makes a page of a program's commands and options.
//! - [`mod@settings`]: reads the fields of a settings struct with their doc comments from its source.

#![forbid(unsafe_code)]

mod layout;
mod reference;
mod settings;
mod shell;

use std::path::{Path, PathBuf};

pub use layout::layout;
pub use reference::reference;
pub use settings::{Setting, settings};
pub use shell::assert_commands_parse;

/// Environment variable with which [`assert_page`] writes the page instead of comparing it.
const UPDATE: &str = "UPDATE_DOCS";

/// The repository's root.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    (here.ancestors().nth(2))
        .expect("docs/test lies two directories below the root")
        .to_path_buf()
}

/// Compares the page at `path`, relative to the repository's root, with `text`. Writes it if `UPDATE_DOCS` is set.
///
/// # Panics
/// If the page differs.
pub fn assert_page(path: &str, text: &str) {
    let file = root().join(path);
    if std::env::var_os(UPDATE).is_some() {
        let dir = file.parent().expect("a page lies in a directory");
        std::fs::create_dir_all(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        std::fs::write(&file, text).unwrap_or_else(|error| panic!("{path}: {error}"));
        return;
    }
    let page = std::fs::read_to_string(&file).unwrap_or_default();
    let differs = (page.lines().zip(text.lines()))
        .position(|(page, text)| page != text)
        .unwrap_or_else(|| page.lines().count().min(text.lines().count()));
    assert!(
        page == text,
        "{path} is not what the program says, from line {} on: run `make docs`",
        differs + 1
    );
}

/// Compares the part of page `path` between `<!-- NAME -->` and `<!-- end -->` with `text`, like [`assert_page`].
///
/// # Panics
/// If it differs, or the page has no such part.
pub fn assert_section(path: &str, name: &str, text: &str) {
    let page = std::fs::read_to_string(root().join(path))
        .unwrap_or_else(|error| panic!("{path}: {error}"));
    let start = format!("<!-- {name} -->\n");
    let parts = page
        .split_once(&start)
        .and_then(|(before, rest)| Some((before, rest.split_once("<!-- end -->")?.1)));
    let (before, after) = parts.unwrap_or_else(|| panic!("{path} has no part {name}"));
    assert_page(path, &format!("{before}{start}{text}<!-- end -->{after}"));
}

/// A fenced code block of a page.
pub struct Block {
    /// Page and line of the fence.
    pub place: String,
    /// First word after the fence: `toml`, `sh`.
    pub language: String,
    /// Second word, which pages do not show: `daemon` for settings of the daemon, `example` for one key of each kind.
    pub tag: String,
    pub text: String,
}

/// All code blocks of README.md and of the pages in docs/, generated ones included.
pub fn blocks() -> Vec<Block> {
    let root = root();
    let mut pages = vec![root.join("README.md")];
    collect_pages(&root.join("docs"), &mut pages);
    let blocks = pages.iter().flat_map(|page| {
        let text = std::fs::read_to_string(page).expect("a readable page");
        let name = page.strip_prefix(&root).expect("a page of the repository");
        blocks_of(&name.display().to_string(), &text)
    });
    blocks.collect()
}

fn collect_pages(dir: &Path, pages: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(dir).expect("a readable directory");
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            collect_pages(&path, pages);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
}

fn blocks_of(page: &str, text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for (index, line) in text.lines().enumerate() {
        match (line.strip_prefix("```"), open.take()) {
            (Some(_), Some(block)) => blocks.push(block),
            (None, Some(mut block)) => {
                block.text.push_str(line);
                block.text.push('\n');
                open = Some(block);
            }
            (Some(words), None) => {
                let mut words = words.split(' ').map(str::to_owned);
                open = Some(Block {
                    place: format!("{page}:{}", index + 1),
                    language: words.next().unwrap_or_default(),
                    tag: words.next().unwrap_or_default(),
                    text: String::new(),
                });
            }
            (None, None) => {}
        }
    }
    if let Some(block) = open {
        panic!("{}: a code block without an end", block.place);
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_their_place_and_language() {
        let blocks = blocks_of("a.md", "# a\n```toml\nx = 1\n```\ntext\n```\ny\nz\n```\n");
        let found: Vec<_> = (blocks.iter())
            .map(|block| {
                (
                    block.place.as_str(),
                    block.language.as_str(),
                    block.text.as_str(),
                )
            })
            .collect();
        assert_eq!(
            found,
            [("a.md:2", "toml", "x = 1\n"), ("a.md:6", "", "y\nz\n")]
        );
    }

    #[test]
    fn the_documents_have_blocks_of_both_kinds() {
        for language in ["toml", "sh"] {
            let count = blocks()
                .iter()
                .filter(|block| block.language == language)
                .count();
            assert!(count > 3, "{count} blocks of {language}");
        }
    }
}
