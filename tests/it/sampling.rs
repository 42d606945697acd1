//! `gpt sample` and `gpt doctor` as a user meets them.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::command::{Done, Place};

fn place() -> Place {
    let place = Place::new();
    place.train("run", 60, &[]).ok();
    place
}

fn sample(place: &Place, more: &[&str]) -> Done {
    let length: &[&str] = if more.contains(&"-n") { &[] } else { &["-n", "30"] };
    place.run(&[&["sample", "run"], length, more].concat())
}

fn rows(place: &Place, more: &[&str]) -> Vec<Value> {
    sample(place, &[more, &["--json"]].concat()).ok().json()["rows"].as_array().unwrap().clone()
}

fn ids(rows: &[Value]) -> Vec<&Value> {
    rows.iter().map(|row| &row["ids"]).collect()
}

#[test]
fn row_i_of_a_batch_is_the_run_with_seed_plus_i() {
    let place = place();
    let batch = rows(&place, &["-p", "line 3", "--batch", "5", "--seed", "7"]);
    for (i, row) in batch.iter().enumerate() {
        let alone = rows(&place, &["-p", "line 3", "--seed", &(7 + i).to_string()]);
        assert_eq!((&row["ids"], &row["text"]), (&alone[0]["ids"], &alone[0]["text"]), "row {i}");
    }
    // The prompt was computed once: the time of the others is not in it, but the summary counts all of them.
    let all = sample(&place, &["-p", "line 3", "--batch", "5", "--json"]).ok().json();
    assert_eq!((all["prompt_tokens"].as_u64(), all["new_tokens"].as_u64()), (Some(30), Some(150)));
}

#[test]
fn every_prompt_of_a_file_gets_its_text_in_order_however_many_fit_at_once() {
    let place = place();
    place.file("plain.txt", "line 1 says\n\nline 22 says yes and then something longer than the context\nx\nline 5\n");
    let json =
        "{\"prompt\": \"line 1\", \"seed\": 9}\n{\"prompt\": \"line 2\", \"max_tokens\": 3}\n{\"prompt\": \"\"}\n";
    place.file("named.jsonl", json);
    let four = rows(&place, &["--prompts", "plain.txt"]);
    assert_eq!(four.len(), 4);
    for width in ["1", "2", "3"] {
        assert_eq!(ids(&rows(&place, &["--prompts", "plain.txt", "--batch", width])), ids(&four), "{width} at a time");
    }
    let named = rows(&place, &["--prompts", "named.jsonl"]);
    assert_eq!(named[0]["ids"], rows(&place, &["-p", "line 1", "--seed", "9"])[0]["ids"]);
    assert_eq!(named[1]["ids"].as_array().unwrap().len(), 3);
    let lines = sample(&place, &["--prompts", "named.jsonl", "--jsonl"]).ok();
    let lines: Vec<Value> = lines.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines, named);
    let text = sample(&place, &["--prompts", "plain.txt"]).ok().stdout;
    let want: Vec<String> = four
        .iter()
        .enumerate()
        .map(|(i, row)| {
            format!("--- {} of 4 ---\n{}{}\n", i + 1, row["prompt"].as_str().unwrap(), row["text"].as_str().unwrap())
        })
        .collect();
    assert_eq!(text, want.join("\n"));
    place.file("empty.txt", "\n\n");
    sample(&place, &["--prompts", "empty.txt"]).fails(1, &["empty.txt", "a prompt on each line"]);
    place.file("bad.jsonl", "{\"prompt\": \"a\"}\n{\"promt\": \"b\"}\n");
    sample(&place, &["--prompts", "bad.jsonl"]).fails(1, &["bad.jsonl", "line 2", "promt"]);
    sample(&place, &["-p", "a", "--batch", "0"]).fails(2, &["0"]);
}

#[test]
fn drafts_change_the_speed_only_and_those_of_other_tokens_are_refused() {
    let place = place();
    let plain = rows(&place, &["-p", "line 3", "--batch", "3"]);
    place.train("run-draft", 20, &[]).ok();
    let found = sample(&place, &["-p", "line 3", "--batch", "3", "--json"]).ok();
    assert!(found.stderr.contains("with the draft"), "{}", found.stderr);
    let found = found.json();
    assert_eq!(ids(found["rows"].as_array().unwrap()), ids(&plain));
    for key in ["acceptance_rate", "draft_tokens", "target_steps"] {
        assert!(found[key].is_number(), "no {key} in {found}");
    }
    let without = sample(&place, &["-p", "line 3", "--batch", "3", "--no-draft", "--json"]).ok().json();
    assert!(without.get("acceptance_rate").is_none());
    let proposed = [
        &["--draft", "ngram", "--draft-tokens", "3"][..],
        &["--draft", "run-draft", "--draft-tokens", "8", "--kv-bits", "8", "--verify"],
        &["--draft", "run", "--verify", "--temperature", "1.3"],
    ];
    for more in proposed {
        let done = sample(&place, &[&["-p", "line 3", "--json"], more].concat()).ok().json();
        assert_eq!(done["verified"].as_bool(), more.contains(&"--verify").then_some(true), "{done}");
    }
    let equal = sample(&place, &["-p", "line 3", "--draft", "run", "--draft-tokens", "4", "--json"]).ok().json();
    assert_eq!(equal["acceptance_rate"], 1.0);
    // The same ids, but other text.
    let json = std::fs::read_to_string(place.path("run-draft/tokenizer.json")).unwrap();
    let vocab = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":null,
        "post_processor":null,"decoder":null,"model":{"type":"WordLevel","vocab":{"<|endoftext|>":0,"a":1},"unk_token":"a"}}"#;
    place.file("run-draft/tokenizer.json", vocab);
    sample(&place, &["-p", "x"]).fails(1, &["run-draft", "tokens", "--no-draft"]);
    place.file("run-draft/tokenizer.json", json);
    for bad in ["0", "33"] {
        sample(&place, &["--draft", "ngram", "--draft-tokens", bad]).fails(2, &[bad]);
    }
}

#[test]
fn ends_biases_and_log_probabilities_are_those_asked_for() {
    let place = place();
    let text = |more: &[&str]| rows(&place, &[&["-p", "line 3", "--temperature", "0"], more].concat())[0].clone();
    let plain = text(&[]);
    let first = plain["ids"][0].as_u64().unwrap();
    let stopped = text(&["--stop-token", &first.to_string()]);
    assert_eq!((stopped["ids"].as_array().unwrap().len(), stopped["finish_reason"].as_str()), (1, Some("stop")));
    let later = text(&["--stop-token", &first.to_string(), "--min-tokens", "5"]);
    let made: Vec<u64> = later["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    assert!(made.len() >= 6 && !made[..5].contains(&first), "{later}");
    let without = text(&["--logit-bias", &format!("{first}=-inf")]);
    assert_ne!(without["ids"][0].as_u64(), Some(first));
    assert_eq!(text(&["--logit-bias", "65=100"])["text"].as_str(), Some(&*"A".repeat(30)));
    let told = text(&["--logprobs", "3"]);
    assert_eq!(told["ids"], plain["ids"]);
    for (id, token) in told["ids"].as_array().unwrap().iter().zip(told["logprobs"].as_array().unwrap()) {
        assert_eq!((&token["id"], &token["top"][0]["id"]), (id, id), "greedy takes the likeliest");
        assert_eq!(
            (token["logprob"].clone(), token["top"].as_array().unwrap().len()),
            (token["top"][0]["logprob"].clone(), 3)
        );
    }
    // The same numbers as those of `gpt score`.
    let whole = format!("line 3{}", plain["text"].as_str().unwrap());
    let score = place.run(&["score", "run", "--text", &whole, "--json"]).ok().json();
    let scored = &score["tokens"][6]["logprob"];
    assert!((scored.as_f64().unwrap() - told["logprobs"][0]["logprob"].as_f64().unwrap()).abs() < 1e-3, "{scored}");
    let hidden = text(&["--hide", "l", "e"]);
    assert_eq!(hidden["ids"], plain["ids"]);
    assert!(!hidden["text"].as_str().unwrap().contains("line"));
    sample(&place, &["--logit-bias", "65"]).fails(2, &["ID=B"]);
    sample(&place, &["--logit-bias", "999=1"]).fails(2, &["999"]);
    sample(&place, &["--stop-token", "999"]).fails(2, &["999"]);
    sample(&place, &["--hide", "", "x"]).fails(2, &["empty"]);
    sample(&place, &["--kv-bits", "5"]).fails(2, &["5", "8 or 4"]);
    sample(&place, &["--kv-type", "f16"]).fails(2, &["f16", "bf16"]);
}

#[test]
fn the_model_says_how_to_sample_and_flags_win() {
    let place = place();
    let plain = rows(&place, &["-p", "line 3"]);
    assert_eq!(ids(&plain), ids(&rows(&place, &["-p", "line 3", "--temperature", "0.8"])));
    place.file("run/generation_config.json", r#"{"do_sample": false, "eos_token_id": [10]}"#);
    let greedy = rows(&place, &["-p", "line 3"]);
    assert_eq!(greedy[0]["ids"], rows(&place, &["-p", "line 3", "--temperature", "0"])[0]["ids"]);
    assert_eq!(greedy[0]["finish_reason"].as_str(), Some("stop"), "a line break ends a text now: {}", greedy[0]);
    place.file("run/generation_config.json", "<html>");
    sample(&place, &[]).fails(1, &["generation_config.json", "JSON"]);
}

#[test]
fn a_computed_prompt_goes_on_in_another_run_of_the_same_model_only() {
    let place = place();
    let long = "line 1 says yes\nline 2 says no\nline 3 says maybe\nline 4 says";
    let plain = rows(&place, &["-p", long]);
    for more in [&["--kv-window", "16"][..], &["--kv-bits", "8"], &[]] {
        let with = |file: [&'static str; 2]| [&["-p", long], more, &file].concat();
        let want = rows(&place, &[&["-p", long], more].concat());
        assert_eq!(ids(&rows(&place, &with(["--save-cache", "cache"]))), ids(&want));
        assert_eq!(ids(&rows(&place, &with(["--load-cache", "cache"]))), ids(&want), "{more:?}");
    }
    // Another end of the same prompt, and no part of it.
    for prompt in [&format!("{long} no"), "x"] {
        let want = rows(&place, &["-p", prompt]);
        assert_eq!(ids(&rows(&place, &["-p", prompt, "--load-cache", "cache"])), ids(&want));
    }
    sample(&place, &["-p", long, "--load-cache", "cache", "--type", "bf16"]).fails(1, &["cache", "another type"]);
    sample(&place, &["-p", long, "--load-cache", "cache", "--kv-bits", "4"]).fails(1, &["settings of the cache"]);
    place.train("other", 3, &[]).ok();
    let other = place.run(&["sample", "other", "-p", long, "--load-cache", "cache"]);
    other.fails(1, &["another model"]);
    let bytes = std::fs::read(place.path("cache")).unwrap();
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    for (name, content) in [("cut", &bytes[..bytes.len() - 9]), ("damaged", &damaged), ("html", b"<html>")] {
        place.file(name, content);
        sample(&place, &["-p", long, "--load-cache", name]).fails(1, &[name]);
    }
    assert_eq!(ids(&plain), ids(&rows(&place, &["-p", long, "--load-cache", "cache"])));
}

#[test]
fn memory_is_told_before_work_starts() {
    let place = place();
    let doctor = |more: &[&str]| place.run(&[&["doctor", "run", "--json"], more].concat()).ok().json();
    let small = doctor(&[]);
    for key in ["memory_bytes", "weight_bytes", "cache_bytes", "workspace_bytes"] {
        assert!(small[key].as_u64().unwrap() > 0, "no {key} in {small}");
    }
    assert_eq!((small["device"].as_str(), small["fits"].as_bool()), (Some("cpu"), Some(true)));
    let large = doctor(&["--batch", "4", "--context", "4000"]);
    assert!(large["cache_bytes"].as_u64() > small["cache_bytes"].as_u64());
    // What it says is what a run then takes.
    let long = sample(&place, &["-n", "300", "--kv-window", "400", "--json"]).ok().json();
    let told = doctor(&["--context", "301", "--kv-window", "400"]);
    assert!(long["cache_bytes"].as_u64() <= told["cache_bytes"].as_u64());
    let need = ["weight_bytes", "cache_bytes", "workspace_bytes"].map(|key| told[key].as_u64().unwrap());
    let budget = (need.iter().sum::<u64>() - need[1] / 2).to_string();
    let full = ["-n", "300", "--kv-window", "400", "--memory-budget", &budget];
    sample(&place, &full).fails(1, &["budget", "this fits: ", "--kv-bits 8"]);
    let narrow = sample(&place, &[&full[..], &["--kv-bits", "8", "--json"]].concat()).ok().json();
    assert!(narrow["memory"]["cache_bytes"].as_u64().unwrap() < need[1] / 2, "{narrow}");
    sample(&place, &["--memory-budget", "10"]).fails(1, &["budget", "fewer rows"]);
    sample(&place, &["--memory-budget", "lots"]).fails(2, &["lots"]);
    sample(&place, &["--memory-budget", "auto"]).ok();
    assert!(doctor(&["--memory-budget", "10"])["advice"].is_string());
}

#[test]
fn starts_are_typed_and_settings_changed_in_between() {
    let place = place();
    let lines =
        "line 3\n/set temperature 0\nline 3\n/set tempratur 1\n/set top-p 7\n/nonsense\n/set\n/help\nline 3\n\n/quit\n";
    let mut child = Command::new(env!("CARGO_BIN_EXE_gpt"))
        .args(["sample", "run", "-i", "-n", "12"])
        .current_dir(place.path("."))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    let (text, told) = (String::from_utf8(done.stdout).unwrap(), String::from_utf8(done.stderr).unwrap());
    assert!(done.status.success(), "{told}");
    let greedy = rows(&place, &["-p", "line 3", "-n", "12", "--temperature", "0"]);
    let greedy = greedy[0]["text"].as_str().unwrap();
    assert!(text.matches(&format!("line 3{greedy}")).count() >= 2, "{text}");
    // An empty line goes on where the last text stopped.
    let more = rows(&place, &["-p", &format!("line 3{greedy}"), "-n", "12", "--temperature", "0"]);
    assert!(text.contains(&format!("line 3{greedy}{}", more[0]["text"].as_str().unwrap())), "{text}");
    for expected in ["tempratur", "top-p 7", "unknown command", "temperature 0", "/quit"] {
        assert!(told.contains(expected), "no {expected} in {told}");
    }
}
