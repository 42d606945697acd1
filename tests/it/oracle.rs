//! Logits of our decoder against candle_transformers' qwen3, llama and mistral on the same random weights.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Activation, VarBuilder};
use candle_transformers::models::{llama, mistral, qwen3};
use gpt::model::config::{GptConfig, ModelType};
use gpt::model::gpt::Gpt;
use gpt::nn::attention::Layout;
use gpt::nn::dropout::Dropout;
use gpt::ops::{ctx::Ctx, simd::Family, storage};
use gpt::tape::Tape;

use crate::reference;

const SEQ: usize = 14;

/// A config that the three oracles can express too: H D = C, one kind of layer.
fn config(model_type: ModelType, window: Option<usize>) -> GptConfig {
    let tie_word_embeddings = model_type == ModelType::Qwen3;
    let windows = vec![window; 2];
    let wide = GptConfig { hidden_size: 32, windows, tie_word_embeddings, ..reference::small_config(model_type, true) };
    assert_eq!(wide.attention_size(), wide.hidden_size);
    wide
}

fn tokens() -> Vec<u32> {
    (0..SEQ as u32).map(|t| (t * 17 + 5) % 64).collect()
}

/// Our logits of every position, and the weights as candle's loaders want them.
fn ours(config: &GptConfig) -> (Vec<Vec<f32>>, VarBuilder<'static>) {
    let mut tensors = HashMap::new();
    let model = Gpt::build(config, &mut |name, shape| {
        let data = reference::random_weight(name, shape);
        tensors.insert(name.to_owned(), Tensor::from_vec(data.clone(), shape, &Device::Cpu)?);
        Ok(data)
    })
    .unwrap();
    let mut ctx = Ctx::cpu(Family::detect());
    let hidden = model.hidden(&mut ctx, &mut Tape::inference(), &tokens(), &Layout::of(SEQ), Dropout::off()).unwrap();
    let hidden =
        storage::tensor(storage::read::<f32>("test", hidden.value()).unwrap().to_vec(), hidden.value().shape());
    let head = if config.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
    let logits = hidden.matmul(&tensors[head].t().unwrap()).unwrap().to_vec2().unwrap();
    (logits, VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu))
}

/// Holds the oracle's last logits of every prefix against ours at that position.
fn compare(name: &str, ours: &[Vec<f32>], mut oracle: impl FnMut(&Tensor) -> candle_core::Result<Tensor>) {
    for length in 1..=SEQ {
        let prefix = Tensor::new(&tokens()[..length], &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let want = oracle(&prefix).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (got, want) in ours[length - 1].iter().zip(&want) {
            assert!((got - want).abs() < 1e-4, "{name}, position {}: {got}, expected {want}", length - 1);
        }
    }
}

#[test]
fn qwen3_logits_equal_candle_transformers() {
    let c = config(ModelType::Qwen3, None);
    let (logits, vb) = ours(&c);
    let oracle = qwen3::Config {
        vocab_size: c.vocab_size,
        hidden_size: c.hidden_size,
        intermediate_size: c.intermediate_size,
        num_hidden_layers: c.num_hidden_layers,
        num_attention_heads: c.num_attention_heads,
        head_dim: c.head_dim,
        attention_bias: false,
        num_key_value_heads: c.num_key_value_heads,
        max_position_embeddings: c.max_position_embeddings,
        sliding_window: None,
        max_window_layers: 0,
        tie_word_embeddings: true,
        rope_theta: c.rope_theta,
        rms_norm_eps: f64::from(c.rms_norm_eps),
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    };
    compare("qwen3", &logits, |ids| qwen3::ModelForCausalLM::new(&oracle, vb.clone())?.forward(ids, 0));
}

#[test]
fn llama_logits_equal_candle_transformers() {
    let c = config(ModelType::Llama, None);
    let (logits, vb) = ours(&c);
    let oracle = llama::Config {
        hidden_size: c.hidden_size,
        intermediate_size: c.intermediate_size,
        vocab_size: c.vocab_size,
        num_hidden_layers: c.num_hidden_layers,
        num_attention_heads: c.num_attention_heads,
        num_key_value_heads: c.num_key_value_heads,
        use_flash_attn: false,
        rms_norm_eps: f64::from(c.rms_norm_eps),
        rope_theta: c.rope_theta as f32,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: c.max_position_embeddings,
        tie_word_embeddings: false,
    };
    let model = llama::Llama::load(vb, &oracle).unwrap();
    compare("llama", &logits, |ids| {
        model.forward(ids, 0, &mut llama::Cache::new(false, DType::F32, &oracle, &Device::Cpu)?)
    });
}

#[test]
fn mistral_logits_equal_candle_transformers_with_and_without_a_window() {
    for window in [None, Some(5)] {
        let c = config(ModelType::Mistral, window);
        let (logits, vb) = ours(&c);
        let oracle = mistral::Config {
            vocab_size: c.vocab_size,
            hidden_size: c.hidden_size,
            intermediate_size: c.intermediate_size,
            num_hidden_layers: c.num_hidden_layers,
            num_attention_heads: c.num_attention_heads,
            head_dim: Some(c.head_dim),
            num_key_value_heads: c.num_key_value_heads,
            hidden_act: Activation::Silu,
            max_position_embeddings: c.max_position_embeddings,
            rms_norm_eps: f64::from(c.rms_norm_eps),
            rope_theta: c.rope_theta,
            // Its mask lets a token see W + 1 keys.
            sliding_window: window.map(|w| w - 1),
            use_flash_attn: false,
        };
        compare("mistral", &logits, |ids| mistral::Model::new(&oracle, vb.clone())?.forward(ids, 0));
    }
}

#[test]
fn windowed_qwen3_logits_equal_the_f64_reference() {
    for window in [1, 2, 5, SEQ, SEQ + 1] {
        let c = config(ModelType::Qwen3, Some(window));
        let (logits, _) = ours(&c);
        let want = reference::logits(&c, &reference::weights(&c), &[tokens()]).unwrap();
        let want = want.squeeze(0).unwrap().to_vec2::<f64>().unwrap();
        for (got, want) in logits.iter().flatten().zip(want.iter().flatten()) {
            assert!((f64::from(*got) - want).abs() < 1e-4, "window {window}: {got}, expected {want}");
        }
    }
}
