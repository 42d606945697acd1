//! Distillation from the command line: students, their defaults, resuming, what is refused.

use crate::command::{Done, Place, SMALL};

/// A teacher of two layers in `teacher`.
fn teacher(place: &Place) {
    let larger: Vec<&str> = SMALL.iter().map(|f| if *f == "1" { "2" } else { *f }).collect();
    let base = ["train", "--data", place.text(), "--out", "teacher", "--steps", "60", "--lr", "5e-3"];
    place.run(&[&base[..], &larger].concat()).ok();
}

fn distill(place: &Place, out: &str, steps: &str, more: &[&str]) -> Done {
    let base = ["distill", "--teacher", "teacher", "--out", out, "--steps", steps, "--json", "--save-every", "5"];
    // The context is the teacher's.
    let small: Vec<&str> = SMALL.chunks(2).filter(|pair| pair[0] != "--context").flatten().copied().collect();
    place.run(&[&base[..], &small, more].concat())
}

fn weights(place: &Place, run: &str) -> Vec<u8> {
    std::fs::read(place.path(run).join("model.safetensors")).unwrap()
}

#[test]
fn a_student_takes_over_what_the_teachers_run_had_and_is_held_against_it() {
    let place = Place::new();
    teacher(&place);
    let base = ["distill", "--teacher", "teacher", "--steps", "40", "--json"];
    let small: Vec<&str> = SMALL.chunks(2).filter(|pair| pair[0] != "--context").flatten().copied().collect();
    let done = place.run(&[&base[..], &small].concat()).ok();
    let said = done.json();
    assert_eq!(said["out"], "teacher-draft");
    for key in ["val_loss", "teacher_val_loss", "acceptance_rate", "acceptance_rate_greedy", "speedup", "train_loss"] {
        assert!(said[key].as_f64().is_some_and(f64::is_finite), "{key} in {said}");
    }
    assert!(done.stderr.contains("gpt sample teacher\n"), "{}", done.stderr);
    let preset = std::fs::read_to_string(place.path("teacher-draft/preset.toml")).unwrap();
    assert!(preset.contains("source = \"text.txt\"") && preset.contains("max_position_embeddings = 16"), "{preset}");
    // Sampling finds it by itself, and writes the same text with it.
    let sampled = place.run(&["sample", "teacher", "-n", "40", "--verify", "--json"]).ok().json();
    assert!(sampled["draft_tokens"].as_u64().is_some_and(|n| n > 0) && sampled["verified"] == true, "{sampled}");
}

#[test]
fn a_student_learns_what_the_teacher_says_not_what_the_text_says() {
    let place = Place::new();
    teacher(&place);
    let loss = |out: &str, more: &[&str]| -> f64 {
        let said = distill(&place, out, "60", &[&["--lr", "1e-2"], more].concat()).ok().json();
        said["train_loss"].as_f64().unwrap()
    };
    // The divergence of a student of the teacher falls towards 0; a loss of the text does not.
    let (few, many) = (distill(&place, "few", "1", &[]).ok().json()["train_loss"].as_f64().unwrap(), loss("many", &[]));
    assert!(many < 0.5 * few, "{few} at the first step, {many} after 60");
    for (i, more) in [
        &["--divergence", "reverse"][..],
        &["--divergence", "jensen-shannon", "--temperature", "2"],
        &["--alpha", "0.5"],
        &["--on-policy", "0.5", "--divergence", "reverse"],
        &["--teacher-top", "8"],
    ]
    .into_iter()
    .enumerate()
    {
        let loss = loss(&format!("run{i}"), more);
        assert!(loss.is_finite() && loss < few, "{more:?}: {loss}");
    }
    // Only the data: as training on it.
    let of_text = distill(&place, "text", "10", &["--alpha", "0"]).ok().json();
    let base = ["train", "--data", "text.txt", "--out", "plain", "--steps", "10", "--json", "--save-every", "5"];
    let plain = place.run(&[&base[..], SMALL].concat()).ok().json();
    let (a, b) = (of_text["val_loss"].as_f64().unwrap(), plain["val_loss"].as_f64().unwrap());
    assert!((a / b - 1.0).abs() < 1e-4, "{a} against {b}");
}

#[test]
fn a_student_that_is_resumed_is_the_one_that_was_not_interrupted() {
    let place = Place::new();
    teacher(&place);
    for (i, more) in [&[][..], &["--on-policy", "0.4"], &["--teacher-top", "4"]].into_iter().enumerate() {
        let (whole, parts) = (format!("whole{i}"), format!("parts{i}"));
        let more = [&["--schedule", "constant"], more].concat();
        distill(&place, &whole, "10", &more).ok();
        distill(&place, &parts, "5", &more).ok();
        distill(&place, &parts, "10", &[&more[..], &["--resume"]].concat()).ok();
        assert_eq!(weights(&place, &whole), weights(&place, &parts), "{more:?}");
    }
    // The teacher's words were kept: asked again they are the same.
    let kept = std::fs::read_dir(place.path(".cache/teachers")).unwrap().count();
    assert_eq!(kept, 1);
    distill(&place, "again", "10", &["--schedule", "constant", "--teacher-top", "4"]).ok();
    assert_eq!(weights(&place, "whole2"), weights(&place, "again"));
    // Damage in what was kept is found out.
    let file = std::fs::read_dir(place.path(".cache/teachers")).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[8..40].fill(0xFF);
    std::fs::write(&file, bytes).unwrap();
    distill(&place, "mended", "10", &["--schedule", "constant", "--teacher-top", "4"]).ok();
    assert_eq!(weights(&place, "whole2"), weights(&place, "mended"));
    // What was never saved begins with what the teacher's run had.
    let small: Vec<&str> = SMALL.chunks(2).filter(|pair| pair[0] != "--context").flatten().copied().collect();
    let begun = ["distill", "--teacher", "teacher", "--out", "begun", "--resume", "--steps", "2", "--json"];
    place.run(&[&begun[..], &small].concat()).ok();
    let preset = std::fs::read_to_string(place.path("begun/preset.toml")).unwrap();
    assert!(preset.contains("source = \"text.txt\""), "{preset}");
    // Another objective is another run.
    distill(&place, "parts0", "20", &["--resume", "--alpha", "0.5"]).fails(2, &["made with"]);
    let base = ["train", "--out", "parts0", "--resume", "--steps", "20"];
    place.run(&base).fails(2, &["made with"]);
}

#[test]
fn what_cannot_be_distilled_says_why() {
    let place = Place::new();
    teacher(&place);
    for (more, said) in [
        (&["--alpha", "2"][..], "shares, from 0 to 1"),
        (&["--on-policy", "-1"], "shares, from 0 to 1"),
        (&["--temperature", "0"], "above 0"),
        (&["--divergence", "backward"], "forward, reverse or jensen-shannon"),
        (&["--teacher-top", "0"], "16"),
        (&["--teacher-top", "8", "--temperature", "2"], "leave one of the two out"),
        (&["--context", "64"], "smaller --context"),
    ] {
        distill(&place, "x", "5", more).fails(2, &[said]);
        assert!(!place.path("x").exists(), "nothing is made before everything is checked: {more:?}");
    }
    place.run(&["tokenizer", "train", "--data", "text.txt", "--vocab", "300", "--out", "tok"]).ok();
    distill(&place, "x", "5", &["--tokenizer", "tok"]).fails(2, &["tokenizer is not that of teacher"]);
    place.run(&["distill", "--teacher", "nowhere"]).fails(1, &["nowhere"]);
    std::fs::remove_file(place.path("teacher/preset.toml")).unwrap();
    distill(&place, "x", "5", &[]).fails(2, &["what it was trained on", "--data"]);
    distill(&place, "y", "2", &["--data", "text.txt"]).ok();
}
