//! Fine-tuning from the command line: adapters, all weights, resuming, merging, what is refused.

use std::path::Path;

use gpt::checkpoint::model_folder::ModelFolder;
use gpt::model::gpt::Batch;
use gpt::ops::{ctx::Ctx, simd::Family, storage};

use crate::command::{Done, Place};

/// A base of text about lines in `base`, and other text in `mine.txt`.
fn base(place: &Place) {
    place.train("base", 60, &["--lr", "5e-3"]).ok();
    let mine: String = (0..300).map(|i| format!("{} is what {} wants\n", ["tea", "ink"][i % 2], i % 23)).collect();
    place.file("mine.txt", mine);
}

fn finetune(place: &Place, out: &str, steps: &str, more: &[&str]) -> Done {
    let usual = ["finetune", "base", "--data", "mine.txt", "--out", out, "--steps", steps, "--eval-every", "10"];
    let small = ["--save-every", "10", "--batch", "4", "--threads", "2", "--json", "--patience", "0"];
    place.run(&[&usual[..], &small, more].concat())
}

fn bytes(place: &Place, file: &str) -> Vec<u8> {
    std::fs::read(place.path(file)).unwrap()
}

fn loss(place: &Place, more: &[&str]) -> f64 {
    let said = place.run(&[&["eval", "--data", "mine.txt", "--json"], more].concat()).ok().json();
    said["loss"].as_f64().unwrap()
}

#[test]
fn an_adapter_learns_the_text_and_leaves_the_base_alone() {
    let place = Place::new();
    base(&place);
    let before = bytes(&place, "base/model.safetensors");
    let done = finetune(&place, "mine", "60", &["--rank", "4"]).ok();
    let said = done.json();
    assert!(before == bytes(&place, "base/model.safetensors"), "the base has changed");
    let (old, new) = (said["base_val_loss"].as_f64().unwrap(), said["val_loss"].as_f64().unwrap());
    assert!(new < 0.8 * old, "{new} after, {old} before");
    assert_eq!(said["lora"]["rank"], 4);
    assert!(said["trained_parameters"].as_u64().unwrap() < said["parameters"].as_u64().unwrap());
    assert!(said["base_sha256"].as_str().unwrap().len() == 64 && done.stderr.contains("unchanged"), "{}", done.stderr);
    let config: serde_json::Value = serde_json::from_slice(&bytes(&place, "mine/adapter_config.json")).unwrap();
    assert_eq!(
        (config["peft_type"].as_str(), config["r"].as_u64(), config["lora_alpha"].as_f64()),
        (Some("LORA"), Some(4), Some(8.0))
    );
    assert_eq!(config["auto_mapping"]["base_sha256"], said["base_sha256"]);
    // The folder alone says everything again, with the loss that the run ended with.
    let close = |a: f64, b: f64| (a - b).abs() < 2e-6;
    assert!(close(loss(&place, &["mine"]), new), "{} and {new}", loss(&place, &["mine"]));
    assert!(close(loss(&place, &["base", "--adapter", "mine"]), new));
    assert!(close(loss(&place, &["base", "--adapter", "mine:0"]), old));
    let half = loss(&place, &["base", "--adapter", "mine:0.5"]);
    assert!(!close(half, new) && !close(half, old));
    assert!(close(loss(&place, &["base", "--adapter", "mine:0.5", "--adapter", "mine:0.5"]), new));
    let text = |args: &[&str]| {
        place.run(&[&["sample"], args, &["-n", "40", "--json"]].concat()).ok().json()["rows"][0]["ids"].clone()
    };
    assert_eq!(text(&["mine"]), text(&["base", "--adapter", "mine"]));
    assert_ne!(text(&["mine"]), text(&["base"]));
    // The newest model is the one that was just made.
    place.run(&["score", "mine", "--text", "tea is"]).ok();
    place.run(&["inspect", "mine"]).ok();
}

#[test]
fn a_run_that_goes_on_gives_the_bytes_of_one_that_was_never_stopped() {
    let place = Place::new();
    base(&place);
    for (kind, flags, file) in [
        ("plain", &["--rank", "4"][..], "adapter_model.safetensors"),
        ("four", &["--rank", "4", "--quantized", "4", "--dropout", "0.1", "--rslora"], "adapter_model.safetensors"),
        ("all", &["--full"], "model.safetensors"),
    ] {
        let [whole, parts] = ["whole", "parts"].map(|run| format!("{kind}-{run}"));
        let schedule = ["--schedule", "constant", "--warmup", "0"];
        finetune(&place, &whole, "30", &[flags, &schedule].concat()).ok();
        finetune(&place, &parts, "13", &[flags, &schedule].concat()).ok();
        let steps = ["finetune", "base", "--resume", "--out", &parts, "--steps", "30", "--json", "--threads", "1"];
        let full: &[&str] = if kind == "all" { &["--full"] } else { &[] };
        place.run(&[&steps[..], full].concat()).ok();
        for file in ["steps/000030/weights.safetensors", "steps/000030/optimizer.safetensors", file] {
            let [a, b] = [&whole, &parts].map(|run| bytes(&place, &format!("{run}/{file}")));
            assert!(a == b, "{kind}: {file} differs");
        }
    }
}

#[test]
fn a_merged_model_says_what_base_and_adapter_say() {
    let place = Place::new();
    base(&place);
    for (run, flags) in [
        ("plain", &["--rank", "4"][..]),
        ("blocks", &["--rank", "4", "--quantized"]),
        ("few", &["--targets", "v,down", "--alpha", "3", "--rslora", "--rank", "2"]),
    ] {
        finetune(&place, run, "20", flags).ok();
        let out = format!("{run}-merged");
        let said = place.run(&["merge", run, "--out", &out, "--json"]).ok().json();
        assert_eq!((said["dtype"].as_str(), said["base"].as_str()), (Some("f32"), Some("base")));
        let (apart, merged) = (loss(&place, &[run]), loss(&place, &[&out]));
        assert!((apart - merged).abs() < 1e-6, "{run}: {apart} and {merged}");
        assert!((loss(&place, &["base"]) - merged).abs() > 1e-3, "{run}: merging did nothing");
        place.run(&["merge", "base", "--adapter", run, "--out", &format!("{out}-16"), "--dtype", "bf16"]).ok();
        let narrow = loss(&place, &[&format!("{out}-16")]);
        assert!((narrow - merged).abs() < 0.02 && narrow != merged, "{run}: {narrow} in bf16, {merged} in f32");
        place.run(&["merge", run, "--out", &out]).fails(2, &["not empty"]);
    }
    // Several at once, each in its share, are added up; a head that was the table is one of its own then.
    place.run(&["merge", "base", "--adapter", "plain:0.5", "--adapter", "few:-2", "--out", "both"]).ok();
    let both = loss(&place, &["base", "--adapter", "plain:0.5", "--adapter", "few:-2"]);
    assert!((loss(&place, &["both"]) - both).abs() < 1e-6);
    let config: serde_json::Value = serde_json::from_slice(&bytes(&place, "both/config.json")).unwrap();
    assert_eq!(config["tie_word_embeddings"], false);
    place.run(&["eval", "base", "--adapter", "plain", "--adapter", "blocks"]).fails(2, &["q8_0"]);
    place.run(&["merge", "base", "--out", "none"]).fails(2, &["nothing to merge"]);
    place.run(&["finetune", "plain", "--data", "mine.txt"]).fails(2, &["is an adapter", "gpt merge"]);
}

#[test]
fn what_cannot_be_is_refused_before_any_work() {
    let place = Place::new();
    base(&place);
    place.run(&["finetune", "base"]).fails(2, &["--data"]);
    for (flags, said) in [
        (&["--rank", "0"][..], "rank"),
        (&["--alpha", "0"], "alpha"),
        (&["--alpha", "nan"], "alpha"),
        (&["--targets", "q,x"], "gate"),
        (&["--quantized", "5"], "8 or 4"),
        (&["--quantized", "base"], "8 or 4"),
        (&["--dropout", "1"], "dropout"),
        (&["--context", "17"], "context"),
        (&["--lr", "-1"], "learning_rate"),
        (&["--full", "--rank", "4"], "--rank"),
        (&["--full", "--quantized", "8"], "--quantized"),
    ] {
        finetune(&place, "x", "1", flags).fails(2, &[said]);
    }
    assert!(!place.path("x").exists());
    finetune(&place, "mine", "10", &["--rank", "2"]).ok();
    finetune(&place, "mine", "10", &["--rank", "2"]).fails(2, &["not empty", "--resume"]);
    // What was never saved cannot go on: it begins, and needs its text for that.
    place.run(&["finetune", "base", "--resume", "--out", "fresh"]).fails(2, &["--data"]);
    finetune(&place, "fresh", "2", &["--resume"]).ok();
    let again = ["finetune", "base", "--resume", "--out", "mine", "--steps", "20"];
    place.run(&[&again[..], &["--rank", "4"]].concat()).fails(2, &["\"rank\":2"]);
    place.run(&[&again[..], &["--full"]].concat()).fails(2, &["lora"]);
    // Another base of the same shape is not the one that it was trained beside.
    place.train("other", 10, &["--seed", "7"]).ok();
    place.run(&["eval", "other", "--adapter", "mine"]).fails(1, &["sha256", "own base"]);
    place.run(&["finetune", "other", "--resume", "--out", "mine", "--steps", "20"]).fails(2, &["made with"]);
    place.run(&["sample", "base", "--adapter", "nowhere"]).fails(1, &["adapter_config.json", "nowhere"]);
    place.run(&["sample", "base", "--adapter", "mine:x"]).fails(2, &["DIR:SCALE"]);
    place.run(&["sample", "base", "--adapter", "base"]).fails(1, &["adapter_config.json"]);
    // Where the base has gone, it is asked for.
    std::fs::rename(place.path("base"), place.path("moved")).unwrap();
    place.run(&["eval", "mine", "--data", "mine.txt"]).fails(1, &["--adapter mine"]);
    place.run(&["eval", "moved", "--adapter", "mine", "--data", "mine.txt"]).ok();
}

#[test]
fn damaged_adapters_are_named() {
    let place = Place::new();
    base(&place);
    finetune(&place, "mine", "10", &["--rank", "2"]).ok();
    let config = String::from_utf8(bytes(&place, "mine/adapter_config.json")).unwrap();
    for (from, to, said) in [
        ("\"LORA\"", "\"IA3\"", "peft_type"),
        ("\"r\": 2", "\"r\": \"two\"", "a whole number"),
        ("\"r\": 2", "\"r\": 3", "shape"),
        ("\"bias\": \"none\"", "\"bias\": \"all\"", "bias"),
        ("\"modules_to_save\": null", "\"modules_to_save\": [\"embed_tokens\"]", "modules_to_save"),
        ("\"lora_alpha\": 4.0", "\"lora_alpha\": null", "lora_alpha"),
        ("{", "<html>", "web page"),
    ] {
        assert!(config.contains(from), "{from} in {config}");
        place.file("mine/adapter_config.json", config.replacen(from, to, 1));
        place.run(&["eval", "base", "--adapter", "mine"]).fails(1, &[said]);
    }
    place.file("mine/adapter_config.json", &config);
    let weights = bytes(&place, "mine/adapter_model.safetensors");
    for damaged in [&weights[..weights.len() - 1], &weights[..20], &[]] {
        place.file("mine/adapter_model.safetensors", damaged);
        place.run(&["sample", "mine"]).fails(1, &["adapter_model.safetensors"]);
    }
}

#[test]
fn all_weights_can_be_trained_too_and_a_short_text_is_enough() {
    let place = Place::new();
    base(&place);
    let before = bytes(&place, "base/model.safetensors");
    let said = finetune(&place, "whole", "40", &["--full"]).ok().json();
    assert!(said["val_loss"].as_f64().unwrap() < 0.8 * said["base_val_loss"].as_f64().unwrap(), "{said}");
    assert!(said["lora"].is_null() && before == bytes(&place, "base/model.safetensors"));
    assert!((loss(&place, &["whole"]) - said["val_loss"].as_f64().unwrap()).abs() < 2e-6);
    // A few lines; named after the base and the text.
    place.file("note.txt", "tea is what I want\n".repeat(3));
    let done =
        place.run(&["finetune", "base", "--data", "note.txt", "--steps", "4", "--validation", "0", "--json"]).ok();
    assert_eq!(done.json()["out"], "checkpoints/base-note");
    place.run(&["sample", "-n", "5"]).ok();
}

/// An adapter that PEFT made, with the logits that transformers computes: `scripts/peers/peft_golden.py`.
#[test]
fn an_adapter_of_peft_gives_the_logits_of_transformers() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/peft");
    let said: serde_json::Value = serde_json::from_slice(&std::fs::read(golden.join("golden.json")).unwrap()).unwrap();
    let numbers =
        |key: &str| -> Vec<f32> { said[key].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect() };
    let ids: Vec<u32> = numbers("ids").iter().map(|id| *id as u32).collect();
    for (key, adapters) in [("base", &[][..]), ("adapted", &[("adapter", 1.0)]), ("half", &[("adapter", 0.5)])] {
        let folder = ModelFolder::open(&golden.join("base")).unwrap();
        let folder = adapters.iter().fold(folder, |f, (name, s)| f.with_adapter(&golden.join(name), *s).unwrap());
        let (model, mut ctx) = (folder.model().unwrap(), Ctx::cpu(Family::detect()));
        let batch = Batch::new(ids.clone(), ids.clone(), ids.len());
        let states = model.states(&mut ctx, &batch).unwrap();
        let head = model.head(&mut ctx).unwrap();
        let logits = states.value().matmul(&head.t().unwrap()).unwrap();
        let (got, want) = (storage::read::<f32>("test", &logits).unwrap().to_vec(), numbers(key));
        assert_eq!(got.len(), want.len());
        let off = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(off < 2e-5, "{key}: off by {off}");
    }
    assert!(numbers("base").iter().zip(numbers("adapted")).any(|(a, b)| (a - b).abs() > 0.01));
}
