//! What the commands do when all is well: their results agree with each other, and their JSON has its keys.

use crate::command::Place;

fn number(json: &serde_json::Value, key: &str) -> f64 {
    json[key].as_f64().unwrap_or_else(|| panic!("no number `{key}` in {json}"))
}

#[test]
fn train_eval_score_and_sample_agree() {
    let place = Place::new();
    let train = place.train("run", 200, &["--json"]).ok().json();
    for key in [
        "parameters",
        "steps",
        "tokens",
        "train_loss",
        "val_loss",
        "val_bpb",
        "tokens_per_second",
        "seconds",
        "peak_memory_bytes",
    ] {
        number(&train, key);
    }
    let eval = place.run(&["eval", "run", "--json"]).ok().json();
    assert!((number(&train, "val_loss") - number(&eval, "loss")).abs() < 1e-6, "{train} {eval}");
    assert!((number(&train, "val_bpb") - number(&eval, "bits_per_byte")).abs() < 1e-6);
    assert!((number(&eval, "perplexity") - number(&eval, "loss").exp()).abs() < 1e-6);
    // Every byte of the held-out tenth but its first is predicted once.
    let size = std::fs::metadata(place.path("text.txt")).unwrap().len() as f64;
    assert!((number(&eval, "tokens") - size * 0.1).abs() < 3.0);
    let strided = place.run(&["eval", "run", "--stride", "4", "--json"]).ok().json();
    assert_eq!(strided["tokens"], eval["tokens"]);
    assert!(number(&strided, "loss") < number(&eval, "loss"), "more context must help: {strided} {eval}");

    // The engine computes the same loss, and nearly the same with narrower weights and caches.
    for (more, bound) in [(&["--type", "f32"][..], 1e-4), (&["--kv-bits", "8"], 0.01), (&["--type", "q8_0"], 0.02)] {
        let engine = place.run(&[&["eval", "run", "--json"], more].concat()).ok().json();
        assert_eq!((&engine["tokens"], &engine["bytes"]), (&eval["tokens"], &eval["bytes"]));
        let off = (number(&engine, "loss") - number(&eval, "loss")).abs();
        assert!(off < bound, "{more:?}: {off}");
    }

    let text = "line 3 says no\nline 4";
    let score = place.run(&["score", "run", "--text", text, "--json"]).ok().json();
    let tokens = score["tokens"].as_array().unwrap();
    assert_eq!(tokens.len(), text.len());
    assert!(tokens[0]["logprob"].is_null() && tokens[1..].iter().all(|t| t["logprob"].as_f64().unwrap() < 0.0));
    place.file("score.txt", text);
    assert_eq!(place.run(&["score", "run", "--file", "score.txt", "--json"]).ok().json()["loss"], score["loss"]);

    let sample = |more: &[&str]| place.run(&[&["sample", "run", "-n", "40", "--json"], more].concat()).ok().json();
    let one = sample(&["-p", "line 3"]);
    let row = &one["rows"][0];
    assert_eq!(row["ids"].as_array().unwrap().len(), 40);
    assert_eq!(one, {
        let mut two = sample(&["-p", "line 3"]);
        for k in ["prefill_seconds", "decode_seconds", "tokens_per_second", "time_to_first_token"] {
            two[k] = one[k].clone();
        }
        two
    });
    assert_ne!(row["ids"], sample(&["-p", "line 3", "--seed", "1"])["rows"][0]["ids"]);
    let greedy = ["-p", "line 3", "--temperature", "0"];
    assert_eq!(sample(&greedy)["rows"][0]["ids"], sample(&[&greedy[..], &["--seed", "9"]].concat())["rows"][0]["ids"]);
    assert_eq!(sample(&["-p", "line 3", "--top-k", "1"])["rows"][0]["ids"], sample(&greedy)["rows"][0]["ids"]);
    place.file("prompt.txt", "line 3");
    assert_eq!(sample(&["-p", "@prompt.txt"])["rows"][0]["ids"], row["ids"]);
    let stopped = sample(&["-p", "line 3", "--temperature", "0", "--stop", " "]);
    assert!(!stopped["rows"][0]["text"].as_str().unwrap().contains(' '));
    let plain = place.run(&["sample", "run", "-n", "40", "-p", "line 3"]).ok();
    assert_eq!(plain.stdout, format!("line 3{}\n", row["text"].as_str().unwrap()));
}

#[test]
fn odd_prompts_and_lengths_work() {
    let place = Place::new();
    place.train("run", 10, &[]).ok();
    let long = "line 3 says no\n".repeat(40);
    place.file("long.txt", &long);
    for (prompt, n, new) in [("", "5", 5), ("@long.txt", "50", 50), ("line", "0", 0), ("é😀", "3", 3)] {
        let json = place.run(&["sample", "run", "-p", prompt, "-n", n, "--json"]).ok().json();
        assert_eq!(json["new_tokens"], new, "{prompt}");
    }
    // Far past the context of 16, in bounded memory.
    let bytes = |n: &str| place.run(&["sample", "run", "-n", n, "--json"]).ok().json()["cache_bytes"].as_u64().unwrap();
    assert!(bytes("2000") <= 3 * bytes("200"));
}

#[test]
fn a_run_is_a_model_folder_and_can_start_another() {
    let place = Place::new();
    place.train("run", 10, &[]).ok();
    for file in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "preset.toml",
        "metrics.jsonl",
        "loss.svg",
        "best/model.safetensors",
        "best/config.json",
    ] {
        assert!(place.path("run").join(file).is_file(), "{file}");
    }
    let inspect = place.run(&["inspect", "run", "--json"]).ok().json();
    assert_eq!(inspect["model_type"], "qwen3");
    let counted: u64 = inspect["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).product::<u64>())
        .sum();
    assert_eq!(inspect["parameters"].as_u64().unwrap(), counted);
    let text = place.text();
    place
        .run(&[
            "train",
            "--init-from",
            "run",
            "--data",
            text,
            "--out",
            "next",
            "--steps",
            "5",
            "--lr",
            "1e-9",
            "--batch",
            "2",
        ])
        .ok();
    let loss = |run: &str| number(&place.run(&["eval", run, "--data", text, "--json"]).ok().json(), "loss");
    assert!((loss("run") - loss("next")).abs() < 1e-3, "it starts from the weights it was given");
    place.run(&["train", "--resume", "--out", "next", "--steps", "8"]).ok();
}

#[test]
fn every_optimizer_schedule_and_shape_trains() {
    let place = Place::new();
    for (i, flags) in [
        &["--optimizer", "adamw", "--schedule", "linear"][..],
        &["--optimizer", "muon", "--schedule", "wsd", "--ema", "0.9"],
        &["--model-type", "llama", "--tie-word-embeddings", "false", "--schedule", "constant"],
        &["--model-type", "mistral", "--window", "4"],
        &["--window", "4", "--full-attention-every", "2", "--recompute", "--dropout", "0.1"],
        &["--patience", "1", "--lr", "1e-8", "--eval-tokens", "0"],
        &["--validation", "0"],
    ]
    .iter()
    .enumerate()
    {
        let json = place.train(&format!("run{i}"), 20, &[flags, &["--json"][..]].concat()).ok().json();
        assert!(json["val_loss"].is_null() == flags.contains(&"--validation"));
        place.run(&["sample", &format!("run{i}"), "-n", "20"]).ok();
    }
}

#[test]
fn tables_and_texts_of_the_tool_itself() {
    let place = Place::new();
    let info = place.run(&["data", "info", "stories", "--json"]).ok().json();
    let entropy = number(&info, "entropy_bpb");
    assert!((0.4..0.8).contains(&entropy));
    assert!(place.run(&["data", "info", "stories"]).ok().stdout.contains("entropy"));
    assert!(place.run(&["presets"]).ok().stdout.contains("behemoth"));
    assert!(place.run(&["presets", "tiny"]).ok().stdout.contains("hidden_size = 128"));
    for shell in ["bash", "zsh", "fish"] {
        assert!(place.run(&["completions", shell]).ok().stdout.contains("gpt"));
    }
    let plan = place.run(&["train", "--preset", "behemoth", "--dry-run", "--json"]).ok().json();
    assert!(number(&plan, "state_bytes") > 4e9 && !place.path("checkpoints").exists(), "a dry run does nothing");
    place
        .run(&["bench", "train", "--preset", "tiny", "--batch", "1", "--context", "16", "--steps", "2", "--json"])
        .ok()
        .json();
    place.run(&["bench", "decode", "--preset", "tiny", "--batch", "2", "--steps", "3", "--json"]).ok().json();
}

#[test]
fn the_command_line_reference_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/cli.md");
    let made = Place::new().run(&["reference"]).ok().stdout;
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(made == found, "docs/reference/cli.md is stale: cargo run --release -- reference > docs/reference/cli.md");
}

#[test]
fn bench_decode_takes_a_checkpoint_in_every_type() {
    let place = Place::new();
    place.train("run", 2, &[]).ok();
    for kind in ["f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"] {
        let json = place.run(&["bench", "decode", "run", "--type", kind, "--tokens", "5", "--json"]).json();
        assert_eq!((json["dtype"].as_str(), json["preset"].as_str()), (Some(kind), Some("run")));
        assert!(json["tokens_per_second"].as_f64().unwrap() > 0.0 && json["stream_share"].as_f64().unwrap() > 0.0);
        let text = place.run(&["sample", "run", "--type", kind, "-n", "8", "--json"]).json();
        assert_eq!(text["new_tokens"].as_u64(), Some(8), "{kind}");
    }
    place.run(&["bench", "decode", "nowhere"]).fails(1, &["nowhere"]);
    place.run(&["sample", "run", "--type", "q9"]).fails(2, &["q9", "q8_0"]);
}
