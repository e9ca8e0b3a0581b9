//! The cache of tokens: made once, checked, shared by processes.

use super::*;

#[test]
fn tokens_are_made_once_and_recreated_when_a_file_changes() {
    let harness = Harness::new("text", bytes(1000), 9);
    let first = harness.open().unwrap();
    let files = harness.token_files();
    assert_eq!(files.len(), 1);
    let made = std::fs::metadata(&files[0]).unwrap().modified().unwrap();
    let second = harness.open().unwrap();
    assert_eq!(second.samples(5, 3).unwrap(), first.samples(5, 3).unwrap());
    let now = std::fs::metadata(&files[0]).unwrap().modified().unwrap();
    assert_eq!(now, made);
    std::fs::write(&harness.settings.files[0].path, bytes(2000)).unwrap();
    let third = harness.open().unwrap();
    assert_eq!(third.tokens(), 2000);
    assert_ne!(third.fingerprint(), first.fingerprint());
    assert_eq!(harness.token_files().len(), 1, "the old one went");
    // Data that is already open still reads the old file.
    assert_eq!(second.samples(5, 3).unwrap(), first.samples(5, 3).unwrap());
    assert!(harness.said.borrow().is_empty());
}

#[test]
fn a_damaged_cache_is_detected_reported_and_recreated() {
    let harness = Harness::new("text", bytes(200_000), 9);
    let good = harness.open().unwrap();
    let path = harness.token_files().remove(0);
    let whole = std::fs::read(&path).unwrap();
    let last = whole.len() - 1;
    for at in [0, 9, 40, 127, 4096, 4096 + 70_000, 4096 + 399_999, last] {
        let mut damaged = whole.clone();
        damaged[at] ^= 4;
        std::fs::write(&path, &damaged).unwrap();
        let again = harness
            .open()
            .unwrap_or_else(|error| panic!("byte {at}: {error}"));
        assert_eq!(again.samples(0, 99).unwrap(), good.samples(0, 99).unwrap());
        let said = harness.said.borrow_mut().pop();
        let said = said.unwrap_or_else(|| panic!("no note about byte {at}"));
        assert!(
            said.contains("are damaged at byte") && said.contains("will be recreated"),
            "{said}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), whole, "byte {at}");
    }
    for length in [0, 100, 4096, 100_000, last] {
        std::fs::write(&path, &whole[..length]).unwrap();
        harness
            .open()
            .unwrap_or_else(|error| panic!("{length} bytes: {error}"));
        assert!(harness.said.borrow_mut().pop().is_some(), "{length} bytes");
        assert_eq!(std::fs::read(&path).unwrap(), whole);
    }
}

#[test]
fn damage_after_the_start_is_an_error() {
    use std::os::unix::fs::FileExt;
    let harness = Harness::new("text", bytes(200_000), 9);
    let data = harness.open().unwrap();
    let path = harness.token_files().remove(0);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[255], 4096 + 150_000).unwrap();
    let failed = (0..data.windows()).find_map(|sample| data.samples(sample, 1).err());
    let text = failed.expect("one of the windows lies there").to_string();
    assert!(text.contains("damaged at byte 135168"), "{text}");
    assert!(text.contains("Start the run again"), "{text}");
}

#[test]
fn one_process_tokenizes_while_the_others_wait() {
    let harness = Harness::new("text", bytes(300_000), 9);
    let (settings, cache) = (harness.settings.clone(), harness.cache());
    let all: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let frame = Frame {
                        model_dir: None,
                        vocab_size: 256,
                        seq_len: 9,
                        evaluates: false,
                    };
                    let corpus = Corpus::find(&settings, &frame).unwrap();
                    corpus.prepare_in(&cache, false, 1, &mut |_| {}).unwrap();
                    Data::open(&corpus, &cache, 7).unwrap().fingerprint()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert!(all.iter().all(|print| *print == all[0]));
    assert_eq!(harness.token_files().len(), 1, "no partial file is left");
}
