//! The direction of dependencies: which module may name which. The table is the one home of that fact.

use std::path::{Path, PathBuf};

/// Module -> the modules that it may `use crate::`. docs/ARCHITECTURE.md draws it.
const ALLOWED: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("files", &["error"]),
    ("device", &["error", "ops"]),
    ("random", &[]),
    ("ops", &["error", "random"]),
    ("tape", &["error", "ops"]),
    ("nn", &["error", "random", "ops", "tape"]),
    ("model", &["error", "random", "ops", "tape", "nn"]),
    ("tokenizer", &["error"]),
    ("data", &["error", "files", "random", "ops", "tokenizer"]),
    ("preset", &["error", "model"]),
    ("checkpoint", &["error", "files", "ops", "nn", "model"]),
    ("engine", &["error", "random", "ops", "nn", "model"]),
    ("eval", &["error", "data", "ops", "model"]),
    ("trainer", &["error", "random", "data", "ops", "nn", "model"]),
    (
        "recipes",
        &[
            "error",
            "files",
            "device",
            "random",
            "ops",
            "nn",
            "model",
            "tokenizer",
            "data",
            "preset",
            "checkpoint",
            "engine",
            "eval",
            "trainer",
        ],
    ),
    ("cli", &["error", "device", "ops", "model", "preset", "recipes"]),
];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Every `crate::name` in a line.
fn named(line: &str) -> impl Iterator<Item = &str> {
    line.match_indices("crate::").map(|(at, found)| {
        let rest = &line[at + found.len()..];
        &rest[..rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())]
    })
}

#[test]
fn modules_name_only_what_lies_below_them() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    for path in sources(&src) {
        let relative = path.strip_prefix(&src).unwrap();
        let top = relative.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
        if ["lib", "main"].contains(&top) {
            continue;
        }
        let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == top) else {
            wrong.push(format!(
                "src/{}: module `{top}` is not in the table of tests/it/layering.rs",
                relative.display()
            ));
            continue;
        };
        for (number, line) in std::fs::read_to_string(&path).unwrap().lines().enumerate() {
            let code = line.split("//").next().unwrap();
            for name in named(code).filter(|n| ALLOWED.iter().any(|(module, _)| module == n)) {
                if name != top && !allowed.contains(&name) {
                    wrong.push(format!("src/{}:{}: `{top}` may not use `{name}`", relative.display(), number + 1));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn only_the_terminal_layer_prints_and_only_ops_are_unsafe() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    for path in sources(&src) {
        let relative = path.strip_prefix(&src).unwrap().to_str().unwrap().to_owned();
        for (number, line) in std::fs::read_to_string(&path).unwrap().lines().enumerate() {
            let code = line.split("//").next().unwrap();
            let at = format!("src/{relative}:{}", number + 1);
            let prints = ["println!(", "eprintln!(", "print!(", "eprint!(", "dbg!("].iter().any(|p| code.contains(p));
            if prints && !relative.starts_with("cli") && relative != "main.rs" {
                wrong.push(format!("{at}: only cli prints"));
            }
            if code.contains("unsafe ") && !relative.starts_with("ops") {
                wrong.push(format!("{at}: unsafe code belongs into ops"));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn files_stay_short_enough_to_read() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["src", "tests"] {
        for path in sources(&root.join(folder)) {
            let lines = std::fs::read_to_string(&path).unwrap().lines().count();
            assert!(lines <= 600, "{} has {lines} lines; split it by what it does", path.display());
        }
    }
}
