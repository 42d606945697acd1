//! The decoder as nested loops over f64: no cache, no blocks, every score computed from the definition, with windows and
//! sinks. The oracle for the engine.

use std::collections::HashMap;

use gpt::model::config::{GptConfig, ModelType};
use gpt::nn::cache::CacheSettings;
use gpt::random::{Purpose, Stream};

/// A random model: what the closures of `Engine::new` are served from.
#[derive(Clone)]
pub struct Plain {
    pub config: GptConfig,
    seed: u64,
    weights: HashMap<String, Vec<f64>>,
}

/// Grouped heads, a head width that is no multiple of 16, and sizes that leave the last panel narrow.
pub fn config(model_type: ModelType, tied: bool, windows: &[Option<usize>]) -> GptConfig {
    GptConfig {
        model_type,
        vocab_size: 70,
        hidden_size: 40,
        intermediate_size: 72,
        num_hidden_layers: windows.len(),
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 20,
        max_position_embeddings: 48,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        tie_word_embeddings: tied,
        windows: windows.to_vec(),
    }
}

impl Plain {
    pub fn new(config: GptConfig, seed: u64) -> Self {
        Self { config, seed, weights: HashMap::new() }
    }

    /// The weight of that name: gains near one, matrices large enough that attention is far from uniform.
    pub fn weight(&self, name: &str, shape: &[usize]) -> Vec<f32> {
        let stream = Stream::new(self.seed, Purpose::Test);
        let salt = name.bytes().fold(7u64, |h, b| (h.wrapping_mul(31) + u64::from(b)) & 0xFF_FFFF);
        let (centre, spread) = if shape.len() == 1 { (1.0, 0.2) } else { (0.0, 1.5 / (shape[1] as f32).sqrt()) };
        (0..shape.iter().product::<usize>()).map(|i| centre + spread * stream.normal(salt, i as u32)).collect()
    }

    fn w(&mut self, name: &str, shape: &[usize]) -> Vec<f64> {
        if !self.weights.contains_key(name) {
            let data = self.weight(name, shape).into_iter().map(f64::from).collect();
            self.weights.insert(name.to_owned(), data);
        }
        self.weights[name].clone()
    }

    /// Logits (T, V).
    pub fn logits(&mut self, ids: &[u32], cache: CacheSettings) -> Vec<Vec<f64>> {
        let config = self.config.clone();
        let (c, v, eps) = (config.hidden_size, config.vocab_size, f64::from(config.rms_norm_eps));
        let table = self.w("model.embed_tokens.weight", &[v, c]);
        let mut x: Vec<Vec<f64>> = ids.iter().map(|id| table[*id as usize * c..][..c].to_vec()).collect();
        for layer in 0..config.num_hidden_layers {
            self.layer(layer, &mut x, cache);
        }
        let gain = self.w("model.norm.weight", &[c]);
        let head = if config.tie_word_embeddings { table } else { self.w("lm_head.weight", &[v, c]) };
        x.iter().map(|x| product(&norm(x, &gain, eps), &head)).collect()
    }

    fn layer(&mut self, layer: usize, x: &mut [Vec<f64>], cache: CacheSettings) {
        let config = self.config.clone();
        let (c, f, d) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (heads, groups) = (config.num_attention_heads, config.num_key_value_heads);
        let eps = f64::from(config.rms_norm_eps);
        let mut w = |part: &str, shape: &[usize]| self.w(&format!("model.layers.{layer}.{part}.weight"), shape);
        let (input, post) = (w("input_layernorm", &[c]), w("post_attention_layernorm", &[c]));
        let (wq, wk) = (w("self_attn.q_proj", &[heads * d, c]), w("self_attn.k_proj", &[groups * d, c]));
        let (wv, wo) = (w("self_attn.v_proj", &[groups * d, c]), w("self_attn.o_proj", &[c, heads * d]));
        let gains = config.qk_norm().then(|| [w("self_attn.q_norm", &[d]), w("self_attn.k_norm", &[d])]);
        let (gate, up) = (w("mlp.gate_proj", &[f, c]), w("mlp.up_proj", &[f, c]));
        let down = w("mlp.down_proj", &[c, f]);
        let split = |x: Vec<f64>, gain: Option<&Vec<f64>>| -> Vec<Vec<f64>> {
            x.chunks(d).map(|head| gain.map_or(head.to_vec(), |gain| norm(head, gain, eps))).collect()
        };
        let normed: Vec<_> = x.iter().map(|x| norm(x, &input, eps)).collect();
        let q: Vec<_> = normed.iter().map(|x| split(product(x, &wq), gains.as_ref().map(|g| &g[0]))).collect();
        let k: Vec<_> = normed.iter().map(|x| split(product(x, &wk), gains.as_ref().map(|g| &g[1]))).collect();
        let v: Vec<_> = normed.iter().map(|x| split(product(x, &wv), None)).collect();
        let (window, sinks) = match config.windows[layer] {
            Some(own) => (own, 0),
            None => (cache.window.unwrap_or(config.max_position_embeddings), cache.sinks),
        };
        for t in 0..x.len() {
            let mut attention = Vec::new();
            for head in 0..heads {
                let kv = head / (heads / groups);
                let seen: Vec<usize> = (0..=t).filter(|p| p + window > t || *p < sinks).collect();
                let score = |p: &usize| {
                    let at = if *p < sinks { t.min(sinks + window - 1) } else { t };
                    let theta = config.rope_theta;
                    let (q, k) = (rotate(&q[t][head], at, theta), rotate(&k[*p][kv], *p, theta));
                    q.iter().zip(&k).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt()
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                let mean = |i| seen.iter().zip(&scores).map(|(p, s)| (s - max).exp() / sum * v[*p][kv][i]).sum::<f64>();
                attention.extend((0..d).map(mean));
            }
            add(&mut x[t], &product(&attention, &wo));
            let h = norm(&x[t], &post, eps);
            let silu = |g: f64| g / (1.0 + (-g).exp());
            let act: Vec<f64> = product(&h, &gate).iter().zip(product(&h, &up)).map(|(g, u)| silu(*g) * u).collect();
            add(&mut x[t], &product(&act, &down));
        }
    }
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

fn product(x: &[f64], weight: &[f64]) -> Vec<f64> {
    weight.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn norm(x: &[f64], gain: &[f64], eps: f64) -> Vec<f64> {
    let rstd = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + eps).sqrt();
    x.iter().zip(gain).map(|(x, gain)| x * rstd * gain).collect()
}

fn rotate(x: &[f64], position: usize, theta: f64) -> Vec<f64> {
    let half = x.len() / 2;
    let pair = |i: usize| {
        let angle = position as f64 * theta.powf(-2.0 * (i % half) as f64 / x.len() as f64);
        let (other, sign) = if i < half { (x[i + half], -1.0) } else { (x[i - half], 1.0) };
        x[i] * angle.cos() + sign * other * angle.sin()
    };
    (0..x.len()).map(pair).collect()
}
