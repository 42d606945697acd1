//! Exact resume: killed at any moment, at other thread counts, cut into other micro-batches.

use std::time::{Duration, Instant};

use crate::command::{Place, SMALL};

/// The bytes of everything that must not depend on interruptions.
fn result(place: &Place, out: &str, step: &str) -> Vec<(String, Vec<u8>)> {
    let names = ["weights.safetensors", "optimizer.safetensors", "metrics.jsonl", "state.json"];
    let files = names.map(|n| format!("{out}/steps/{step}/{n}"));
    let roots = ["model.safetensors", "best/model.safetensors", "metrics.jsonl"].map(|n| format!("{out}/{n}"));
    files.into_iter().chain(roots).map(|n| (n.replacen(out, "", 1), std::fs::read(place.path(&n)).unwrap())).collect()
}

fn assert_same(a: &[(String, Vec<u8>)], b: &[(String, Vec<u8>)]) {
    for ((name, a), (_, b)) in a.iter().zip(b) {
        assert!(a == b, "{name} differs");
    }
}

const FLAGS: &[&str] = &["--ema", "0.9", "--dropout", "0.1", "--accumulate", "2"];

#[test]
fn a_run_killed_at_five_moments_ends_with_the_same_bytes() {
    let place = Place::new();
    let whole = Instant::now();
    place.train("whole", 300, FLAGS).ok();
    let whole = whole.elapsed();
    // Moments spread over the run; saves come every ten steps, so some of them fall into one.
    for (kill, share) in [0.13, 0.21, 0.08, 0.17, 0.11].into_iter().enumerate() {
        let threads = if kill == 2 { "3" } else { "2" };
        let text = place.text();
        let base =
            ["train", "--data", text, "--out", "killed", "--steps", "300", "--eval-every", "10", "--save-every", "10"];
        let small: Vec<&str> = SMALL.iter().copied().filter(|f| *f != "--threads").collect();
        let args = [&base[..], &small[..small.len() - 1], FLAGS, &["--resume", "--threads", threads]].concat();
        let mut child = place.start(&args);
        std::thread::sleep(Duration::from_secs_f64(whole.as_secs_f64() * share));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    place.train("killed", 300, &[FLAGS, &["--resume"]].concat()).ok();
    assert_same(&result(&place, "whole", "000300"), &result(&place, "killed", "000300"));
}

#[test]
fn a_longer_run_repeats_a_shorter_one_and_seeds_count() {
    let place = Place::new();
    let constant = ["--schedule", "constant", "--warmup", "0"];
    place.train("a", 20, &constant).ok();
    place.train("a", 40, &[&constant[..], &["--resume"]].concat()).ok();
    place.train("b", 40, &constant).ok();
    assert_same(&result(&place, "a", "000040"), &result(&place, "b", "000040"));
    place.train("seed", 40, &[&constant[..], &["--seed", "1"]].concat()).ok();
    let metrics = |run: &str| std::fs::read(place.path(run).join("metrics.jsonl")).unwrap();
    assert_ne!(metrics("b"), metrics("seed"));
}

#[test]
fn four_times_one_is_one_times_four_also_when_it_changes_between() {
    let place = Place::new();
    let losses = |run: &str| -> Vec<f64> {
        let text = std::fs::read_to_string(place.path(run).join("metrics.jsonl")).unwrap();
        text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()["loss"].as_f64().unwrap()).collect()
    };
    let adamw = ["--optimizer", "adamw"];
    place.train("whole", 20, &adamw).ok();
    place.train("cut", 20, &[&adamw[..], &["--batch", "1", "--accumulate", "4"]].concat()).fails(2, &["--batch"]);
    let small = SMALL.to_vec();
    let at = small.iter().position(|f| *f == "--batch").unwrap();
    let run = |dtype: &str, out: &str, steps: &str, batch: &str, accumulate: &str, more: &[&str]| {
        let mut small = small.clone();
        small[at + 1] = batch;
        let base = ["train", "--data", place.text(), "--out", out, "--eval-every", "10", "--save-every", "10"];
        let rest = [
            "--steps",
            steps,
            "--accumulate",
            accumulate,
            "--schedule",
            "constant",
            "--warmup",
            "0",
            "--optimizer",
            "adamw",
            "--lr",
            "3e-3",
            "--dtype",
            dtype,
        ];
        place.run(&[&base[..], &small, &rest, more].concat()).ok()
    };
    // The sums of gradients differ in their last bits, which now and then tips a weight over to the next bf16.
    for (dtype, bound) in [("f32", 1e-6), ("bf16", 1e-3)] {
        let [four, mixed] = ["four", "mixed"].map(|name| format!("{name}-{dtype}"));
        run(dtype, &four, "30", "4", "1", &[]);
        run(dtype, &mixed, "15", "4", "1", &[]);
        let told = run(dtype, &mixed, "30", "1", "4", &["--resume"]).stderr;
        assert!(told.contains("train.batch changes from 4 to 1"), "{told}");
        for (a, b) in losses(&four).iter().zip(losses(&mixed)) {
            assert!((a - b).abs() < bound, "{dtype}: {a} against {b}");
        }
        assert_eq!(losses(&four).len(), losses(&mixed).len());
    }
}

#[test]
fn resuming_says_what_it_does_and_refuses_another_model() {
    let place = Place::new();
    place.train("run", 10, &[]).ok();
    place.train("run", 10, &[]).fails(2, &["exists", "--resume", "--out"]);
    let text = place.text();
    let resume = ["train", "--resume", "--out", "run", "--data", text];
    place.run(&[&resume[..], &["--layers", "2"]].concat()).fails(2, &["model.num_hidden_layers", "another model"]);
    place.run(&[&resume[..], &["--preset", "small"]].concat()).fails(2, &["preset tiny", "small"]);
    place.run(&[&resume[..], &["--steps", "5"]].concat()).fails(2, &["step 10 already"]);
    let done = place.run(&[&resume[..], &["--steps", "12", "--lr", "1e-4"]].concat()).ok();
    assert!(done.stderr.contains("optimizer.learning_rate changes"), "{}", done.stderr);
    let done = place.train("new", 10, &["--resume"]).ok();
    assert!(done.stderr.contains("starting at step 0"), "{}", done.stderr);
}

#[test]
fn a_damaged_step_is_passed_over() {
    let place = Place::new();
    place.train("run", 20, &[]).ok();
    place.file("run/steps/000020/weights.safetensors", "broken");
    let done = place.train("run", 30, &["--resume"]).ok();
    assert!(done.stderr.contains("passed over") && done.stderr.contains("from step 10"), "{}", done.stderr);
}

#[test]
fn two_writers_of_one_run_exclude_each_other() {
    let place = Place::new();
    std::fs::create_dir_all(place.path("run")).unwrap();
    let lock = std::fs::File::create(place.path("run/.lock")).unwrap();
    lock.lock().unwrap();
    place.train("run", 10, &["--resume"]).fails(1, &["in use"]);
}

fn interrupt(child: &std::process::Child) {
    let sent = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Waits until `path` exists and holds something.
fn wait_for(path: &std::path::Path) {
    let start = Instant::now();
    while !std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some()) {
        assert!(start.elapsed() < Duration::from_secs(60), "{} stays empty", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn ctrl_c_saves_and_going_on_gives_the_bytes_of_an_uninterrupted_run() {
    let place = Place::new();
    place.train("whole", 300, FLAGS).ok();
    let base = ["train", "--data", place.text(), "--out", "stopped", "--steps", "300", "--eval-every", "10"];
    let mut child = place.start(&[&base[..], &["--save-every", "10"], SMALL, FLAGS].concat());
    wait_for(&place.path("stopped/steps"));
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(0), "one Ctrl-C ends a run in order");
    place.train("stopped", 300, &[FLAGS, &["--resume"]].concat()).ok();
    assert_same(&result(&place, "whole", "000300"), &result(&place, "stopped", "000300"));
}

#[test]
fn a_second_ctrl_c_leaves_at_once_and_loses_nothing_saved() {
    let place = Place::new();
    place.train("run", 20, FLAGS).ok();
    let before = result(&place, "run", "000020");
    // A step that would take hours.
    let endless = ["--steps", "30", "--accumulate", "1000000", "--resume", "--save-every", "10", "--eval-every", "10"];
    let base = ["train", "--data", place.text(), "--out", "run"];
    let mut child = place.start(&[&base[..], SMALL, &endless].concat());
    std::thread::sleep(Duration::from_millis(500));
    interrupt(&child);
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none(), "the first Ctrl-C lets the step finish");
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_same(&before, &result(&place, "run", "000020"));
    place.train("run", 30, &[FLAGS, &["--resume"]].concat()).ok();
}
