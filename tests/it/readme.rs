//! Every `gpt` command of the README and the guides runs, training ones for a step.

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

/// Runs the `gpt` commands of a page, at least so many, in a folder with texts of one's own and a run.
fn run_commands(page: &str, least: usize) {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join(page)).unwrap();
    let place = Place::new();
    place.train("checkpoints/run", 2, &[]).ok();
    place.file("my-texts/a.txt", "some text of mine\n".repeat(200));
    let commands = text.lines().filter_map(|l| l.strip_prefix("    gpt ")).map(|l| l.split(" #").next().unwrap());
    let mut count = 0;
    for line in commands {
        let mut words = words(line);
        match words[0].as_str() {
            "train" => words.extend(["--steps", "1", "--batch", "1", "--context", "32"].map(str::to_owned)),
            "finetune" if !line.contains("--steps") => words.extend(["--steps", "2"].map(str::to_owned)),
            "distill" => words.extend(["--steps", "1", "--batch", "1"].map(str::to_owned)),
            _ => {}
        }
        place.run(&words.iter().map(String::as_str).collect::<Vec<_>>()).ok();
        count += 1;
    }
    assert!(count >= least, "{page} shows commands");
}

#[test]
fn every_command_of_the_guides_runs() {
    run_commands("docs/guides/draft-model.md", 3);
    run_commands("docs/guides/write-like-me.md", 8);
}

#[test]
fn every_command_of_the_readme_runs() {
    run_commands("README.md", 5);
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
