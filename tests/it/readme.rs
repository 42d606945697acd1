//! Every `gpt` command of the README runs, training ones for a step.

use crate::command::Place;

/// The words of a command line, with double quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![];
    for (i, part) in line.split('"').enumerate() {
        if i % 2 == 1 {
            words.push(part.to_owned());
        } else {
            words.extend(part.split_whitespace().map(str::to_owned));
        }
    }
    words
}

#[test]
fn every_command_of_the_readme_runs() {
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let place = Place::new();
    place.train("checkpoints/run", 2, &[]).ok();
    place.file("my-texts/a.txt", "some text of mine\n".repeat(200));
    let commands = readme.lines().filter_map(|l| l.strip_prefix("    gpt ")).map(|l| l.split(" #").next().unwrap());
    let mut count = 0;
    for line in commands {
        let mut words = words(line);
        if words[0] == "train" {
            words.extend(["--steps", "1", "--batch", "1", "--context", "32"].map(str::to_owned));
        }
        place.run(&words.iter().map(String::as_str).collect::<Vec<_>>()).ok();
        count += 1;
    }
    assert!(count >= 5, "the README shows commands");
    for file in [
        "docs/ARCHITECTURE.md",
        "docs/CONTRIBUTING.md",
        "docs/adding-an-op.md",
        "docs/performance.md",
        "docs/sampling.md",
        "scripts/speedrun.sh",
    ] {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        assert!(path.is_file(), "{file}, which the README names, is missing");
    }
}
