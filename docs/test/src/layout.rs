//! Reads the layout of `#[repr(C)]` structs from their source: offset, size and name of each field.

use std::fmt::Write;

/// Returns a table of the fields of `struct NAME` in `source`. `sizes` has the size in bytes of types other than integers, and the values of
/// constants that are array lengths.
///
/// # Panics
/// If there is no such struct, or the size of a field is unknown.
pub fn layout(source: &str, name: &str, sizes: &[(&str, usize)]) -> String {
    let head = format!("struct {name} {{\n");
    let (_, rest) = source
        .split_once(&head)
        .unwrap_or_else(|| panic!("there is no struct {name}"));
    let (body, _) = rest.split_once("\n}").expect("a struct ends");
    let mut table = "offset  bytes  field\n".to_owned();
    let mut offset = 0;
    for line in body
        .lines()
        .map(str::trim)
        .filter(|line| !line.starts_with("//"))
    {
        let (field, kind) = (line
            .strip_suffix(',')
            .and_then(|line| line.split_once(": ")))
        .unwrap_or_else(|| panic!("{name}: no field: {line}"));
        let bytes = bytes_of(kind, sizes);
        let _ = writeln!(
            table,
            "{offset:6}  {bytes:5}  {}",
            field.trim_start_matches("pub ")
        );
        offset += bytes;
    }
    let _ = writeln!(table, "{offset:6}         end");
    table
}

fn bytes_of(kind: &str, sizes: &[(&str, usize)]) -> usize {
    let named = |name: &str| {
        sizes
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, bytes)| *bytes)
    };
    if let Some((element, count)) = kind
        .strip_prefix('[')
        .and_then(|kind| kind.strip_suffix(']')?.split_once("; "))
    {
        let count = count.parse().ok().or_else(|| named(count));
        return bytes_of(element, sizes)
            * count.unwrap_or_else(|| panic!("the length of {kind} is unknown"));
    }
    match kind {
        "u8" => 1,
        "u32" => 4,
        "u64" => 8,
        other => named(other).unwrap_or_else(|| panic!("the size of {other} is unknown")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_lie_one_after_another() {
        let source = "struct A {\n    head: Head,\n    /// Why.\n    pub n: [u32; 2],\n    name: [u8; MAX],\n}\n";
        let expected = "offset  bytes  field\n     0     32  head\n    32      8  n\n    40      3  name\n    43         end\n";
        assert_eq!(layout(source, "A", &[("Head", 32), ("MAX", 3)]), expected);
    }
}
