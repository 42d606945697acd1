//! Runs the `gpt` binary in a folder of its own and says everything about it when an expectation fails.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// A temporary folder to run commands in.
pub struct Place {
    dir: tempfile::TempDir,
}

/// What a command did.
pub struct Done {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    told: String,
}

/// Flags that make a model small enough to train in a moment.
pub const SMALL: &[&str] = &[
    "--layers",
    "1",
    "--hidden-size",
    "32",
    "--heads",
    "2",
    "--kv-heads",
    "1",
    "--head-dim",
    "16",
    "--intermediate-size",
    "32",
    "--context",
    "16",
    "--batch",
    "4",
    "--threads",
    "2",
];

impl Place {
    pub fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Writes a file and gives its name back.
    pub fn file<'a>(&self, name: &'a str, content: impl AsRef<[u8]>) -> &'a str {
        if let Some(parent) = Path::new(name).parent() {
            std::fs::create_dir_all(self.path(parent.to_str().unwrap())).unwrap();
        }
        std::fs::write(self.path(name), content).unwrap();
        name
    }

    /// A few kilobytes of text that a small model can learn something of.
    pub fn text(&self) -> &'static str {
        let lines: String =
            (0..400).map(|i| format!("line {} says {}\n", i % 37, ["yes", "no", "maybe"][i % 3])).collect();
        self.file("text.txt", lines)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt"));
        command.args(args).current_dir(self.dir.path()).stdin(Stdio::null());
        // Nothing of a test goes into the cache of the user who runs it.
        command.env("GPT_CACHE", self.path(".cache"));
        command
    }

    pub fn start(&self, args: &[&str]) -> Child {
        self.command(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    pub fn run(&self, args: &[&str]) -> Done {
        self.run_with(args, &[])
    }

    /// Runs with more variables in the environment.
    pub fn run_with(&self, args: &[&str], variables: &[(&str, &str)]) -> Done {
        let output = self.command(args).envs(variables.iter().copied()).output();
        let Output { status, stdout, stderr } = output.unwrap();
        let (stdout, stderr) =
            (String::from_utf8_lossy(&stdout).into_owned(), String::from_utf8_lossy(&stderr).into_owned());
        let told = format!("gpt {}\nexit {status}\n--- stdout\n{stdout}\n--- stderr\n{stderr}", args.join(" "));
        Done { code: status.code(), stdout, stderr, told }
    }

    /// Trains a small model on `text` for `steps` into `out`, with more flags.
    pub fn train(&self, out: &str, steps: u32, more: &[&str]) -> Done {
        let steps = steps.to_string();
        let base = [
            "train",
            "--data",
            self.text(),
            "--out",
            out,
            "--steps",
            &steps,
            "--eval-every",
            "10",
            "--save-every",
            "10",
        ];
        self.run(&[&base[..], SMALL, more].concat())
    }
}

impl Done {
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.told);
        self
    }

    /// Exit code, one plain error naming each of `said`, and no trace of a crash.
    #[track_caller]
    pub fn fails(self, code: i32, said: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.told);
        assert!(self.stderr.contains("error: "), "{}", self.told);
        assert!(!self.stderr.contains("panicked") && !self.stderr.contains("RUST_BACKTRACE"), "{}", self.told);
        for text in said {
            assert!(self.stderr.contains(text), "`{text}` is not in\n{}", self.told);
        }
        self
    }

    /// The JSON document on the last line.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        let last = self.stdout.lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}\n{}", self.told))
    }
}
