//! Tests of `model_folder`: written, opened, equal byte for byte, and refused when it is not whole.

use super::*;
use crate::model::config::ModelType;

fn config() -> GptConfig {
    GptConfig {
        model_type: ModelType::Qwen3,
        vocab_size: 64,
        hidden_size: 16,
        intermediate_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        max_position_embeddings: 32,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        tie_word_embeddings: true,
        windows: vec![None; 2],
    }
}

fn tensors(config: &GptConfig) -> Vec<NamedTensor> {
    let shapes = Gpt::tensor_shapes(config).into_iter().enumerate();
    let filled = shapes.map(|(i, (name, shape))| {
        let data = vec![i as f32; shape.iter().product()];
        NamedTensor { name, shape, data }
    });
    filled.collect()
}

fn companions() -> Companions {
    let [tokenizer_json, tokenizer_config_json] = ["{\"a\": 1}", "{}"].map(String::from);
    Companions { end_of_text: 63, start: 10, tokenizer_json, tokenizer_config_json }
}

fn write_to(folder: &Path, tensors: &[NamedTensor]) {
    write(folder, &config(), tensors, &companions()).unwrap();
}

fn open_error(folder: &Path) -> Error {
    ModelFolder::open(folder).err().expect("must be refused")
}

/// (name, bytes) of all files, sorted.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap());
    let mut all: Vec<_> =
        entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect();
    all.sort();
    all
}

#[test]
fn a_folder_comes_back_and_two_are_equal_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("runs/a"), dir.path().join("b"));
    let tensors = tensors(&config());
    write_to(&a, &tensors);
    // Over a former one, with what a killed writer left.
    write_to(&b, &tensors[..1]);
    std::fs::write(b.join(".tmp-77-model.safetensors"), "half").unwrap();
    write_to(&b, &tensors);
    assert_eq!(contents(&a), contents(&b));
    let folder = ModelFolder::open(&a).unwrap();
    assert_eq!(folder.config, config());
    for t in &tensors {
        assert_eq!(folder.weights.get(&t.name, &t.shape).unwrap(), t.data);
    }
    assert!(folder.model().is_ok());
}

#[test]
fn extra_tensors_are_refused_unless_known() {
    let dir = tempfile::tempdir().unwrap();
    let with = |name: &str| {
        let mut tensors = tensors(&config());
        tensors.push(NamedTensor { name: name.into(), shape: vec![1], data: vec![0.0] });
        write_to(dir.path(), &tensors);
        ModelFolder::open(dir.path())
    };
    assert!(with("lm_head.weight").is_ok(), "a tied head may be stored as well");
    assert!(with("model.layers.0.self_attn.rotary_emb.inv_freq").is_ok());
    let error = with("model.layers.2.input_layernorm.weight").err().unwrap().to_string();
    assert!(error.contains("`model.layers.2.input_layernorm.weight`") && error.contains("qwen3"), "{error}");
}

#[test]
fn folders_that_are_not_whole_say_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("run");
    assert!(open_error(&folder).to_string().contains("found nothing"));
    std::fs::create_dir_all(folder.join("steps")).unwrap();
    let error = open_error(&folder);
    assert!(error.to_string().contains("config.json") && error.hint().unwrap().contains("--resume"), "{error:?}");
    write_to(&folder, &tensors(&config())[1..]);
    let error = ModelFolder::open(&folder).unwrap().model().err().unwrap().to_string();
    assert!(error.contains("`model.embed_tokens.weight`") && error.contains("no such tensor"), "{error}");
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    assert!(open_error(&folder).to_string().contains("model.safetensors"));
    std::fs::write(folder.join("config.json"), "<html>").unwrap();
    assert!(open_error(&folder).to_string().contains("web page"));
    assert!(open_error(&folder.join("config.json")).to_string().contains("found a file"));
}

#[test]
fn a_place_that_cannot_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = write(&file.join("run"), &config(), &tensors(&config()), &companions()).unwrap_err().to_string();
    assert!(error.contains("file: expected a folder, found a file"), "{error}");
}
