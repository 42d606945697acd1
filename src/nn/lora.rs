//! A low-rank correction beside a frozen linear layer: its settings, its parameters under PEFT's names, its place on the tape.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::nn::dropout::Dropout;
use crate::nn::parameter::{Parameter, Part, Role};
use crate::ops::ctx::{Ctx, Value};
use crate::ops::{dropout, lora};
use crate::random::{Purpose, Stream};

/// A projection that can be corrected, as flags name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
    Head,
}

impl Target {
    pub const ALL: [Target; 8] =
        [Target::Q, Target::K, Target::V, Target::O, Target::Gate, Target::Up, Target::Down, Target::Head];

    pub fn name(self) -> &'static str {
        match self {
            Target::Q => "q",
            Target::K => "k",
            Target::V => "v",
            Target::O => "o",
            Target::Gate => "gate",
            Target::Up => "up",
            Target::Down => "down",
            Target::Head => "head",
        }
    }

    /// The module's name in Hugging Face's models.
    pub fn module(self) -> &'static str {
        match self {
            Target::Q => "q_proj",
            Target::K => "k_proj",
            Target::V => "v_proj",
            Target::O => "o_proj",
            Target::Gate => "gate_proj",
            Target::Up => "up_proj",
            Target::Down => "down_proj",
            Target::Head => "lm_head",
        }
    }

    /// The projection whose weight has that name.
    pub fn of_weight(name: &str) -> Option<Self> {
        let module = name.strip_suffix(".weight")?.rsplit('.').next()?;
        Self::ALL.into_iter().find(|target| target.module() == module)
    }
}

/// What is corrected, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraSettings {
    /// r: rows of A, columns of B.
    pub rank: usize,
    /// The correction is scaled by alpha / r, or by alpha / sqrt(r) with `rslora`.
    pub alpha: f32,
    /// The share of inputs of A that are dropped in training.
    pub dropout: f32,
    /// Rank-stabilised scale (Kalajdzievski, arXiv 2312.03732).
    pub rslora: bool,
    /// Sorted, each once.
    pub targets: Vec<Target>,
}

impl LoraSettings {
    /// The usual settings for a rank: alpha is twice that, all projections of the blocks are corrected.
    pub fn of_rank(rank: usize) -> Self {
        let targets = Target::ALL.into_iter().filter(|target| *target != Target::Head).collect();
        Self { rank, alpha: 2.0 * rank as f32, dropout: 0.0, rslora: false, targets }
    }

    pub fn scale(&self) -> f32 {
        let rank = self.rank as f32;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Whether the weight of that name is corrected.
    pub fn corrects(&self, name: &str) -> bool {
        Target::of_weight(name).is_some_and(|target| self.targets.contains(&target))
    }

    pub fn validate(&self) -> Result<()> {
        if self.rank == 0 || self.rank > 1 << 12 {
            return Err(Error::usage(format!("a rank of {}", self.rank)).with_hint("--rank is from 1 to 4096"));
        }
        if !self.alpha.is_finite() || self.alpha == 0.0 {
            let what = format!("an alpha of {}", self.alpha);
            return Err(Error::usage(what).with_hint("--alpha is a number that is not 0; twice the rank is usual"));
        }
        if self.targets.is_empty() {
            let all = Target::ALL.map(Target::name).join(",");
            return Err(Error::usage("no targets to adapt").with_hint(format!("--targets takes some of {all}")));
        }
        Ok(())
    }
}

/// The names in an adapter file of A and B for the weight of that name.
pub fn names(weight: &str) -> [String; 2] {
    let module = weight.strip_suffix(".weight").unwrap_or(weight);
    ["A", "B"].map(|factor| format!("base_model.model.{module}.lora_{factor}.weight"))
}

/// The correction of a layer of one or more parts.
#[derive(Debug)]
pub struct Lora {
    pub a: Arc<Parameter>,
    pub b: Arc<Parameter>,
    segments: Vec<lora::Segment>,
    scale: f32,
    dropout: f32,
    /// Tells the corrections of a model apart.
    site: u64,
}

impl Lora {
    /// The correction of those of `parts` that the settings name, if there are any; `input` is the layer's. A is uniform in
    /// +-1/sqrt(in), B zero: the layer starts as it was.
    pub fn new(settings: &LoraSettings, parts: &[Part], input: usize, (seed, site): (u64, u64)) -> Option<Self> {
        let rank = settings.rank;
        let (mut segments, mut a_parts, mut b_parts, mut rows) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for part in parts.iter().filter(|part| settings.corrects(&part.name)) {
            let [a, b] = names(&part.name);
            let at = segments.len() * rank;
            let own = rows..rows + part.rows.len();
            a_parts.push(Part { name: a, rows: at..at + rank });
            b_parts.push(Part { name: b, rows: own.clone() });
            rows = own.end;
            segments.push(lora::Segment { columns: part.rows.clone(), rows: own });
        }
        if segments.is_empty() {
            return None;
        }
        let (stream, bound) = (Stream::new(seed, Purpose::Adapter), 1.0 / (input as f32).sqrt());
        let ranks = rank * segments.len();
        let init = (0..ranks * input).map(|i| bound * (2.0 * stream.uniform(site, i as u32) - 1.0)).collect();
        let a = Arc::new(Parameter::new(Role::Matrix, a_parts, &[ranks, input], init));
        let b = Arc::new(Parameter::new(Role::Matrix, b_parts, &[rows, rank], vec![0.0; rows * rank]));
        Some(Self { a, b, segments, scale: settings.scale(), dropout: settings.dropout, site })
    }

    pub fn factors(&self) -> lora::Factors<'_> {
        lora::Factors { a: self.a.master(), b: self.b.master(), segments: &self.segments, scale: self.scale }
    }

    /// A weight with the correction added, whole: for a head, whose op needs it so.
    pub fn merged(&self, ctx: &mut Ctx, weight: &Parameter) -> Result<Value> {
        let whole = weight.whole(ctx)?;
        lora::corrected(ctx, &whole, self.factors())
    }

    /// The mask for the input of A, if anything is dropped there.
    pub fn mask(&self, pass: Dropout) -> Option<dropout::Mask> {
        pass.adapter_mask(self.dropout, self.site)
    }

    /// From x (N, in), u (N, S r), dy (N, out) and du (N, S r): the gradients of the factors.
    pub fn backward(&self, ctx: &mut Ctx, inner: (&Value, &Value), outer: (&Value, &Value)) -> Result<()> {
        let ((x, u), (dy, du)) = (inner, outer);
        self.a.write_gradient(|da, a_store| {
            self.b.write_gradient(|db, b_store| {
                lora::backward(ctx, (x, u), (dy, du), self.factors(), (da, a_store), (db, b_store))
            })
        })
    }

    /// The gradients of the factors from that of the corrected weight (out, in) itself, for a layer of one part whose product
    /// is taken with the merged weight: dB = scale dW A^T, dA = scale B^T dW.
    pub fn backward_merged(&self, ctx: &mut Ctx, dweight: &Value) -> Result<()> {
        self.a.write_gradient(|da, a_store| {
            self.b.write_gradient(|db, b_store| {
                lora::backward_merged(ctx, self.factors(), dweight, (da, a_store), (db, b_store))
            })
        })
    }
}
