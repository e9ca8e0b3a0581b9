//! Tests that the tables of `docs/on-disk-format.md` match the stored structs.

use docs_test::{assert_section, layout};

use super::catalog::JOBS_MAX;
use super::*;

const PAGE: &str = "docs/on-disk-format.md";

/// Stored structs: section of the page, file, name.
const STRUCTS: [(&str, &str, &str); 11] = [
    ("head", include_str!("sealed.rs"), "Head"),
    ("superblock", include_str!("superblock.rs"), "Raw"),
    (
        "catalog header",
        include_str!("catalog.rs"),
        "RawCatalogHeader",
    ),
    ("catalog job", include_str!("catalog.rs"), "RawEntry"),
    ("catalog device", include_str!("catalog.rs"), "RawDevice"),
    (
        "definition header",
        include_str!("tile_table.rs"),
        "RawTableHeader",
    ),
    ("definition tile", include_str!("tile_table.rs"), "RawTile"),
    ("record header", include_str!("manifest.rs"), "RawRecord"),
    ("record tile", include_str!("manifest.rs"), "RawVersion"),
    ("record blob", include_str!("manifest.rs"), "RawBlob"),
    ("mark", include_str!("manifest.rs"), "RawMark"),
];

#[test]
fn the_tables_in_docs_are_the_structs_that_are_stored() {
    let sizes = [
        ("Head", size_of::<sealed::Head>()),
        ("JOB_NAME_BYTES_MAX", definition::JOB_NAME_BYTES_MAX),
        ("PATH_BYTES_MAX", 256),
    ];
    for (part, source, name) in STRUCTS {
        let table = layout(source, name, &sizes);
        assert_section(PAGE, part, &format!("```text\n{table}```\n"));
    }
}

#[test]
fn the_offsets_in_docs_are_the_stores() {
    let kib = |bytes: u64| bytes >> 10;
    let rows = [
        (
            SUPERBLOCK_OFFSETS[0],
            BLOCK,
            "superblock, copy A",
            "every device",
        ),
        (
            SUPERBLOCK_OFFSETS[1],
            BLOCK,
            "superblock, copy B",
            "every device",
        ),
        (
            CATALOG_OFFSETS[0],
            CATALOG_BYTES_MAX,
            "catalog, copy A",
            "the metadata device",
        ),
        (
            CATALOG_OFFSETS[1],
            CATALOG_BYTES_MAX,
            "catalog, copy B",
            "the metadata device",
        ),
    ];
    let mut table = "| offset | at most | what | where |\n|---|---|---|---|\n".to_owned();
    for (offset, bytes, what, device) in rows {
        table += &format!(
            "| {} KiB | {} KiB | {what} | {device} |\n",
            kib(offset),
            kib(bytes)
        );
    }
    table += &format!(
        "| {} KiB | to the end | extents of tiles; on the metadata device also the jobs' areas | every device |\n",
        kib(DATA_OFFSET)
    );
    table += &format!(
        "\nFormat version {FORMAT_VERSION}, blocks of {BLOCK} bytes, at most {DEVICES_MAX} devices and {JOBS_MAX} jobs.\n"
    );
    assert_section(PAGE, "offsets", &table);
}

#[test]
fn the_magic_numbers_in_docs_are_the_stores() {
    let magics = [
        ("superblock", superblock::MAGIC),
        ("catalog", catalog::MAGIC),
        ("definition", tile_table::MAGIC),
        ("record, void", manifest::RECORD_MAGIC),
        ("mark", manifest::MARK_MAGIC),
    ];
    let mut table = "| structure | magic |\n|---|---|\n".to_owned();
    for (what, magic) in magics {
        table += &format!("| {what} | `{}` |\n", String::from_utf8_lossy(&magic));
    }
    assert_section(PAGE, "magic", &table);
}
