//! Pulls a drive out while its tiles are read. What could go wrong: the zero bytes that a removed NVMe drive returns are taken for a read, the other
//! drive's tiles are refused too, the daemon dies, a commit without the drive is acknowledged.

use std::collections::BTreeSet;
use std::path::Path;

use crate::drives::Drives;
use crate::machine::Parts;
use crate::store::Store;
use crate::writer;

#[test]
fn a_drive_that_is_pulled_out_is_named_and_the_other_serves_on() {
    if let Some(socket) = std::env::var_os(writer::SOCKET) {
        return writer::read_until_refused(Path::new(&socket));
    }
    let Some(parts) = Parts::find() else { return };
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(2, "psync");
    let devices = store.devices.iter();
    let base = devices.map(|path| std::fs::read(path).unwrap()).collect();
    let drives = Drives::serve(dir.path(), base);
    let test = "removal::a_drive_that_is_pulled_out_is_named_and_the_other_serves_on";
    let mut machine = parts.boot(dir.path(), &drives, &writer::script(test, ""));
    let (mut devices, mut tiles) = (BTreeSet::new(), BTreeSet::new());
    let (mut refusal, mut alive) = (None, false);
    while let Some(line) = machine.line() {
        if line.contains("READING") {
            machine.pull_out(1);
        }
        if let Some((_, what)) = line.split_once("REFUSED tile ") {
            let words: Vec<_> = what.split(' ').map(str::to_owned).collect();
            tiles.insert(words[0].clone());
            devices.insert(words[2].clone());
        }
        if let Some((_, why)) = line.split_once("NOT COMMITTED ") {
            refusal = Some(why.to_owned());
        }
        alive |= line.contains("ALIVE true");
    }
    let printed = machine.printed().join("\n");
    assert_eq!(devices, BTreeSet::from(["1".to_owned()]), "{printed}");
    assert!(
        (1..writer::TILES as usize).contains(&tiles.len()),
        "{printed}"
    );
    let refusal = refusal.unwrap_or_else(|| panic!("a commit without the drive: {printed}"));
    assert!(refusal.contains("tiles of job guest failed"), "{refusal}");
    assert!(alive, "{printed}");
}
