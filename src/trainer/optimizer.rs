//! AdamW for everything, or Muon for the matrices inside the blocks and AdamW for the rest.

use std::sync::Arc;

use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::model::gpt::Gpt;
use crate::nn::parameter::{Parameter, Role};
use crate::ops::adamw::{self, Adamw};
use crate::ops::ctx::Ctx;
use crate::ops::muon::{self, Muon};
use crate::ops::storage;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Adamw,
    Muon,
}

impl Kind {
    pub const NAMES: [&'static str; 2] = ["adamw", "muon"];

    pub fn named(name: &str) -> Result<Self> {
        match name {
            "adamw" => Ok(Kind::Adamw),
            "muon" => Ok(Kind::Muon),
            _ => Err(Error::usage(format!("unknown optimizer `{name}`"))
                .with_hint(format!("one of: {}", Self::NAMES.join(", ")))),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub kind: Kind,
    pub beta1: f32,
    pub beta2: f32,
    pub epsilon: f32,
    /// On matrices only, decoupled from the gradient.
    pub weight_decay: f32,
    /// Muon's.
    pub momentum: f32,
    /// Highest global gradient norm; 0 does not clip.
    pub clip: f32,
    /// Decay of the averaged weights; 0 keeps none.
    pub ema: f32,
    /// Standard deviations above the running mean at which a step is skipped; 0 skips only what is not finite.
    pub spike_threshold: f32,
}

/// Moments of one parameter.
struct Moments {
    first: Tensor,
    /// None under Muon.
    second: Option<Tensor>,
}

pub struct Optimizer {
    settings: Settings,
    moments: Vec<Moments>,
    averages: Vec<Tensor>,
}

impl Optimizer {
    /// Moments at rest; averages, if kept, begin at the weights.
    pub fn new(model: &Gpt, settings: Settings) -> Result<Self> {
        let zeros = |p: &Arc<Parameter>| storage::tensor(vec![0f32; p.master().elem_count()], p.master().shape());
        let moments = |p: &Arc<Parameter>| Moments {
            first: zeros(p),
            second: (!Self::uses_muon(settings.kind, p)).then(|| zeros(p)),
        };
        let copy = |p: &Arc<Parameter>| {
            let weights = storage::read::<f32>("averages", p.master())?.to_vec();
            Ok(storage::tensor(weights, p.master().shape()))
        };
        let averages: Result<Vec<Tensor>> =
            if settings.ema > 0.0 { model.trainable().map(copy).collect() } else { Ok(Vec::new()) };
        Ok(Self { settings, moments: model.trainable().map(moments).collect(), averages: averages? })
    }

    fn uses_muon(kind: Kind, parameter: &Parameter) -> bool {
        kind == Kind::Muon && parameter.role == Role::Matrix
    }

    /// The averaged weights in the order of the parameters; none without EMA.
    pub fn averages(&self) -> &[Tensor] {
        &self.averages
    }

    /// Everything that resuming needs beside the weights: (kind, tensors in the order of the parameters).
    pub fn state(&self) -> Vec<(&'static str, Vec<Option<&Tensor>>)> {
        let mut state = vec![
            ("first_moment", self.moments.iter().map(|m| Some(&m.first)).collect()),
            ("second_moment", self.moments.iter().map(|m| m.second.as_ref()).collect()),
        ];
        if !self.averages.is_empty() {
            state.push(("average", self.averages.iter().map(Some).collect()));
        }
        state
    }

    /// One update of every parameter from its gradient; the step's numbers come from the scalars.
    pub fn step(&self, ctx: &mut Ctx, model: &Gpt, scalars: &Tensor) -> Result<()> {
        let s = self.settings;
        let mut matrices = Vec::new();
        for (index, (parameter, moments)) in model.trainable().zip(&self.moments).enumerate() {
            let (master, gradient, ema) = (parameter.master(), parameter.gradient(), self.averages.get(index));
            let weight_decay = if parameter.role == Role::Gain { 0.0 } else { s.weight_decay };
            match &moments.second {
                Some(second) => {
                    let target = adamw::Target { master, gradient, first: &moments.first, second, ema };
                    let adamw = Adamw { beta1: s.beta1, beta2: s.beta2, epsilon: s.epsilon, weight_decay };
                    adamw::step(ctx, target, adamw, scalars)?;
                }
                None => {
                    let parts = parameter.parts.iter().map(|p| p.rows.clone()).collect();
                    matrices.push(muon::Target { master, gradient, momentum: &moments.first, ema, parts });
                }
            }
        }
        if matrices.is_empty() {
            return Ok(());
        }
        let muon = Muon { momentum: s.momentum, weight_decay: s.weight_decay, ..Muon::default() };
        muon::step(ctx, &matrices, muon, scalars)
    }
}
