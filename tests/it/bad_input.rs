//! Wrong files, wrong values, wrong places: one message that says what to do, the right exit code, nothing lost.

use crate::command::{Place, SMALL};

#[test]
fn data_that_cannot_be_trained_on() {
    let place = Place::new();
    std::fs::create_dir(place.path("empty")).unwrap();
    std::fs::create_dir(place.path("images")).unwrap();
    place.file("images/a.png", [0u8, 1, 2, 3]);
    place.file("nothing.txt", "");
    place.file("one.txt", "x");
    place.file("short.txt", "too short");
    place.file("binary.bin", [7u8, 0, 255, 3].repeat(100));
    place.file("page.json", "{}");
    let train = |data: &str, code: i32, said: &[&str]| {
        place.run(&[&["train", "--data", data, "--out", "run", "--steps", "2"], SMALL].concat()).fails(code, said);
        assert!(!place.path("run/steps").exists());
    };
    train("nothing.txt", 1, &["nothing.txt", "empty file"]);
    train("one.txt", 1, &["needs 17"]);
    train("short.txt", 1, &["8 tokens", "--context 7"]);
    train("binary.bin", 1, &["binary.bin", "NUL byte", "--allow-binary"]);
    train("empty", 1, &["empty", "none of them text"]);
    train("images", 1, &["1 files, none of them text"]);
    train("missing.txt", 1, &["missing.txt"]);
    train("storeis", 2, &["did you mean `stories`"]);
    let text = "a line of text\n".repeat(20);
    place.file("text.txt", text);
    let args = ["train", "--data", "text.txt", "--out", "run", "--steps", "2", "--validation", "0.001"];
    place.run(&[&args[..], SMALL].concat()).fails(1, &["held-out split", "--validation"]);
    place
        .run(
            &[&["train", "--data", "binary.bin", "--allow-binary", "true", "--out", "any", "--steps", "2"], SMALL]
                .concat(),
        )
        .ok();
}

#[test]
fn values_that_make_no_sense() {
    let place = Place::new();
    for (flags, said) in [
        (&["--preset", "tinny"][..], &["tinny", "`tiny`"][..]),
        (&["--batch", "0"], &["train.batch is 0"]),
        (&["--context", "0"], &["max_position_embeddings is 0"]),
        (&["--heads", "3"], &["128", "3 heads", "--heads 1 or 2 or 4"]),
        (&["--hidden-size", "200"], &["200", "--hidden-size 192 or 224"]),
        (&["--kv-heads", "3"], &["4 attention heads", "--kv-heads"]),
        (&["--steps", "3", "--tokens", "5"], &["train.steps", "train.tokens"]),
        (&["--set", "model.hiden_size=3"], &["model.hiden_size", "`model.hidden_size`"]),
        (&["--set", "model.hidden_size"], &["KEY=VALUE"]),
        (&["--lr", "fast"], &["learning_rate", "fast"]),
        (&["--lr", "-1"], &["learning_rate"]),
        (&["--dropout", "1.5"], &["dropout"]),
        (&["--schedule", "sine"], &["sine", "cosine"]),
        (&["--optimizer", "sgd"], &["sgd", "adamw"]),
        (&["--dtype", "f16"], &["bf16", "f32"]),
        (&["--device", "cuda"], &["cuda"]),
        (&["--cpu-kernels", "sse9"], &["sse9", "portable"]),
        (&["--threads", "0"], &["--threads"]),
        (&["--steps", "0"], &["no length"]),
        (&["--model-type", "gpt9"], &["gpt9", "qwen3"]),
        (&["--model-type", "llama", "--window", "8"], &["llama", "qwen3"]),
        (&["--stepz", "3"], &["--steps"]),
    ] {
        place.run(&[&["train", "--out", "run"], flags].concat()).fails(2, said);
        assert!(!place.path("run").exists(), "{flags:?} left something behind");
    }
    place.run(&["trian"]).fails(2, &["train"]);
}

#[test]
fn places_that_cannot_be_written() {
    let place = Place::new();
    place.file("file", "in the way");
    place.train("file/run", 2, &[]).fails(1, &["file/run"]);
    place.train("file", 2, &[]).fails(1, &["file"]);
}

#[test]
fn checkpoints_that_are_none() {
    let place = Place::new();
    place.run(&["sample"]).fails(2, &["no checkpoint", "gpt train"]);
    place.run(&["sample", "nowhere"]).fails(1, &["nowhere"]);
    place.train("run", 10, &[]).ok();
    let model = std::fs::read(place.path("run/model.safetensors")).unwrap();
    let config = std::fs::read_to_string(place.path("run/config.json")).unwrap();
    let broken = |name: &str, content: &[u8], said: &[&str]| {
        let good = std::fs::read(place.path("run").join(name)).unwrap();
        std::fs::write(place.path("run").join(name), content).unwrap();
        for command in ["sample", "eval"] {
            place.run(&[command, "run"]).fails(1, said);
        }
        std::fs::write(place.path("run").join(name), good).unwrap();
    };
    broken("model.safetensors", b"", &["model.safetensors", "empty file"]);
    broken("model.safetensors", &model[..model.len() / 2], &["model.safetensors"]);
    broken("model.safetensors", b"<!doctype html>", &["web page"]);
    broken("config.json", b"{", &["config.json"]);
    broken("config.json", config.replace("qwen3", "gpt2").as_bytes(), &["config.json", "gpt2"]);
    broken(
        "config.json",
        config.replace("\"hidden_size\": 32", "\"hidden_size\": 64").as_bytes(),
        &["tensor", "expected", "[320, 64]", "[320, 32]"],
    );
    broken(
        "config.json",
        config.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2").as_bytes(),
        &["tensor"],
    );
    broken("tokenizer.json", b"{}", &["tokenizer.json"]);
    std::fs::remove_file(place.path("run/model.safetensors")).unwrap();
    place.run(&["sample", "run"]).fails(1, &["model.safetensors"]);
    for (flags, said) in [
        (&["--temperature", "-1"][..], "temperature"),
        (&["--temperature", "nan"], "temperature"),
        (&["--top-p", "1.5"], "top"),
        (&["--min-p", "-0.1"], "min"),
        (&["--repetition-penalty", "0"], "repetition"),
        (&["--stop", ""], "stop"),
    ] {
        place.run(&[&["sample", "run"], flags].concat()).fails(2, &[said]);
    }
}

/// A tokenizer with one added token more than the model has rows.
#[test]
fn a_vocabulary_smaller_than_its_tokenizer_is_refused_before_any_work() {
    let place = Place::new();
    place.train("run", 10, &[]).ok();
    place.train("fits", 10, &[]).ok();
    for (run, ids) in [("fits", 320), ("run", 321)] {
        let mut tokenizer: serde_json::Value =
            serde_json::from_slice(&std::fs::read(place.path(run).join("tokenizer.json")).unwrap()).unwrap();
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        let usual = added[0].clone();
        for id in 257..ids {
            let mut token = usual.clone();
            token["id"] = id.into();
            token["content"] = format!("<added {id}>").into();
            token["special"] = false.into();
            added.push(token);
        }
        std::fs::write(place.path(run).join("tokenizer.json"), tokenizer.to_string()).unwrap();
    }
    let text = ["--data", "text.txt", "--steps", "2", "--out", "new", "--batch", "4"];
    let student: Vec<&str> = SMALL.chunks(2).filter(|pair| pair[0] != "--context").flatten().copied().collect();
    let commands = |run: &'static str| -> Vec<Vec<&str>> {
        vec![
            [&["train", "--init-from", run], &text[..]].concat(),
            [&["train", "--init-from", run, "--dry-run"], &text[..]].concat(),
            [&["finetune", run], &text[..]].concat(),
            [&["finetune", run, "--full"], &text[..]].concat(),
            [&["distill", "--teacher", run, "--out", "new", "--steps", "2"], &student[..]].concat(),
            vec!["score", run, "--text", "yes"],
            vec!["eval", run],
            vec!["eval", run, "--type", "f32"],
            vec!["sample", run, "-n", "2"],
            vec!["sample", "fits", "-n", "2", "--draft", run],
        ]
    };
    for command in commands("run") {
        place.run(&command).fails(1, &["config.json", "found 320", "321", "resize_token_embeddings"]);
        assert!(!place.path("new").exists(), "{command:?} left something behind");
    }
    // A row for each id is enough; padding is not needed.
    for command in commands("fits") {
        place.run(&command).ok();
        let _ = std::fs::remove_dir_all(place.path("new"));
    }
}

/// A full disk: a tmpfs too small for a saved state. Skipped where it cannot be mounted.
#[test]
fn a_full_disk_loses_nothing() {
    let place = Place::new();
    let disk = place.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let mount =
        std::process::Command::new("mount").args(["-t", "tmpfs", "-o", "size=500k", "tmpfs"]).arg(&disk).output();
    if !mount.is_ok_and(|o| o.status.success()) {
        eprintln!("skipped: mounting a tmpfs is not permitted here");
        return;
    }
    let done = std::panic::catch_unwind(|| {
        place.train("disk/run", 10, &["--keep", "1"]).ok();
        place.train("disk/run", 40, &["--resume", "--keep", "9"]).fails(1, &["disk/run", "space"]);
        let (newest, damaged) = gpt::checkpoint::steps::newest(&place.path("disk/run")).unwrap();
        assert!(newest.is_some_and(|s| s.step >= 10) && damaged.is_empty());
        assert!(
            std::fs::read_dir(place.path("disk/run/steps")).unwrap().all(|e| !e
                .unwrap()
                .file_name()
                .to_string_lossy()
                .starts_with('.'))
        );
    });
    let _ = std::process::Command::new("umount").arg(&disk).status();
    done.unwrap();
}

#[test]
fn an_empty_split_names_a_share_that_works() {
    let place = Place::new();
    let text = place.file("small.txt", "a small text of some fifty letters and a few more to train on");
    let train = |share: &str| {
        let flags = ["train", "--data", text, "--out", "run", "--steps", "1", "--validation", share];
        place.run(&[&flags[..], SMALL].concat())
    };
    let refused = train("0.001");
    let said = refused.stderr.clone();
    refused.fails(1, &["held-out", "--validation 0."]);
    let share = said.split("--validation ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    assert_eq!(train(share).code, Some(0), "the share that the error named, {share}, does not work");
}
