//! Tests of `steps`: whatever a kill or a bad disk leaves behind, the newest complete step is found and never pruned.

use super::*;

fn files(salt: u8) -> Vec<(&'static str, Vec<u8>)> {
    vec![("a", vec![salt; 100]), ("b.json", vec![salt, 1, 2])]
}

/// The names below `steps/`, sorted.
fn names(run: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(run.join("steps")).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn newest_step(run: &Path) -> Option<u64> {
    newest(run).unwrap().0.map(|found| found.step)
}

#[test]
fn the_newest_complete_step_is_found_past_every_kind_of_damage() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path();
    assert!(newest(run).unwrap().0.is_none());
    for step in 1..=8 {
        write(run, step, &files(step as u8)).unwrap();
    }
    let at = |step: u64, name: &str| run.join(format!("steps/{step:06}/{name}"));
    std::fs::write(at(8, MANIFEST), r#"{"files": {}}"#).unwrap();
    std::fs::write(at(7, MANIFEST), "").unwrap();
    std::fs::remove_file(at(6, MANIFEST)).unwrap();
    std::fs::write(at(5, "a"), [5u8; 99]).unwrap();
    std::fs::write(at(4, "a"), [0u8; 100]).unwrap();
    std::fs::remove_file(at(3, "b.json")).unwrap();
    for stray in [".tmp-000009", "+10", "11", "notes"] {
        std::fs::create_dir_all(run.join("steps").join(stray)).unwrap();
    }
    let (found, damaged) = newest(run).unwrap();
    let found = found.unwrap();
    assert_eq!(found.step, 2);
    assert_eq!(found.read("a").unwrap(), [2u8; 100]);
    let said = ["none", "empty file", MANIFEST, "expected 100 bytes, found 99", "sha256", "b.json"];
    assert_eq!(damaged.len(), said.len(), "{damaged:#?}");
    for (told, said) in damaged.iter().zip(said) {
        assert!(told.contains("is passed over") && told.contains(said), "{told} against {said}");
    }
}

#[test]
fn pruning_keeps_the_newest_and_clears_what_was_left_over() {
    let dir = tempfile::tempdir().unwrap();
    for step in [10, 20, 30] {
        write(dir.path(), step, &files(0)).unwrap();
    }
    std::fs::create_dir_all(dir.path().join("steps/.tmp-000040/half")).unwrap();
    prune(dir.path(), 2).unwrap();
    assert_eq!(names(dir.path()), ["000020", "000030"]);
    prune(dir.path(), 0).unwrap();
    assert_eq!(names(dir.path()), ["000030"], "one is always kept");
}

#[test]
fn damaged_steps_do_not_count_when_pruning() {
    let dir = tempfile::tempdir().unwrap();
    for step in [10, 20, 30, 40] {
        write(dir.path(), step, &files(0)).unwrap();
    }
    for step in [20, 40] {
        std::fs::remove_file(dir.path().join(format!("steps/{step:06}/a"))).unwrap();
    }
    prune(dir.path(), 2).unwrap();
    assert_eq!(names(dir.path()), ["000010", "000020", "000030", "000040"]);
    prune(dir.path(), 1).unwrap();
    assert_eq!(newest_step(dir.path()), Some(30));
}

/// A damaged step 500 is passed over, the run goes on from 400 and is saved at 450: that one is now the newest.
#[test]
fn a_step_that_is_written_outdates_later_ones() {
    let dir = tempfile::tempdir().unwrap();
    for step in [400, 500] {
        write(dir.path(), step, &files(0)).unwrap();
    }
    std::fs::write(dir.path().join("steps/000500/a"), [7u8; 100]).unwrap();
    assert_eq!(newest_step(dir.path()), Some(400));
    write(dir.path(), 450, &files(1)).unwrap();
    prune(dir.path(), 1).unwrap();
    assert_eq!(names(dir.path()), ["000450"]);
}

#[test]
fn a_step_written_again_replaces_the_old_one_at_whatever_moment_it_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (run, steps) = (dir.path(), dir.path().join("steps"));
    write(run, 5, &files(1)).unwrap();
    write(run, 5, &files(2)).unwrap();
    let content = || newest(run).unwrap().0.unwrap().read("a").unwrap()[0];
    assert_eq!((names(run), content()), (vec!["000005".to_owned()], 2));
    // Killed when the new one is whole and the old one still there.
    let again = steps.join("000005.new");
    fill(&again, &files(3)).unwrap();
    assert_eq!(content(), 3);
    // Killed when the old one was set aside.
    std::fs::rename(steps.join("000005"), steps.join(".tmp-old-000005")).unwrap();
    assert_eq!(content(), 3);
    // The next writer brings it to an end.
    write(run, 6, &files(4)).unwrap();
    prune(run, 9).unwrap();
    assert_eq!(names(run), ["000005", "000006"]);
    std::fs::remove_dir_all(steps.join("000006")).unwrap();
    assert_eq!(content(), 3);
}

#[test]
fn a_failing_write_leaves_older_steps_and_no_rest() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), 1, &files(1)).unwrap();
    // A file name with a folder that does not exist cannot be created.
    let error = write(dir.path(), 2, &[("a", vec![1]), ("none/b", vec![2])]).unwrap_err();
    assert!(error.to_string().contains("none/b"));
    assert_eq!(newest_step(dir.path()), Some(1));
    assert_eq!(names(dir.path()), ["000001"]);
    // Nor can a folder below a file.
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(
        write(&file.join("run"), 1, &files(1))
            .unwrap_err()
            .to_string()
            .contains("file: expected a folder, found a file")
    );
}

/// A real full disk: a tmpfs of 256 KiB. Without the right to mount (root) there is nothing to test with; then
/// `atomic::tests::a_full_disk_names_the_file_and_what_to_do` is what is left.
#[test]
fn a_full_disk_keeps_the_steps_that_are_there() {
    let dir = tempfile::tempdir().unwrap();
    let mount = |args: &[&str]| std::process::Command::new(args[0]).args(&args[1..]).arg(dir.path()).output();
    if !mount(&["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs"]).is_ok_and(|o| o.status.success()) {
        return;
    }
    let result = std::panic::catch_unwind(|| {
        write(dir.path(), 1, &files(1)).unwrap();
        let error = write(dir.path(), 2, &[("a", vec![1; 100]), ("large", vec![2; 1 << 20])]).unwrap_err();
        assert!(error.to_string().contains("large"), "{error}");
        assert!(error.hint().unwrap().contains("space"), "{error:?}");
        assert_eq!((names(dir.path()), newest_step(dir.path())), (vec!["000001".to_owned()], Some(1)));
        let path = dir.path().join("x");
        std::fs::write(&path, "old").unwrap();
        assert!(atomic::write(&path, vec![0; 1 << 20]).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        write(dir.path(), 2, &files(2)).unwrap();
        assert_eq!(newest_step(dir.path()), Some(2), "room was given back");
    });
    mount(&["umount"]).unwrap();
    result.unwrap();
}
