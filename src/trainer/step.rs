//! One training step, and the state that it changes: weights, moments, averages, the step's device scalars, the cursor.
//!
//! Nothing inside a step is read back to the host (a GPU graph can hold it): learning rate, clip factor and the decision to
//! skip are device scalars, and the caller reads the record when the step is done.

use candle_core::Tensor;

use super::objective::Objective;
use super::optimizer::{Optimizer, Settings};
use crate::error::{Error, Result};
use crate::model::gpt::{Batch, Gpt, Source};
use crate::nn::dropout::Dropout;
use crate::nn::parameter::{NamedTensor, Parameter};
use crate::ops::ctx::Ctx;
use crate::ops::gemm::Precision;
use crate::ops::guard::{self, Guard};
use crate::ops::scalars::{Scalar, Scalars};
use crate::ops::{gradient_norm, storage};

/// What a step reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepRecord {
    /// Steps done, this one included.
    pub step: u64,
    /// Mean nats a target over the global batch.
    pub loss: f32,
    pub gradient_norm: f32,
    pub learning_rate: f64,
    /// The loss or the norm was not finite or far off, and the weights were left alone.
    pub skipped: bool,
}

pub struct Trainer {
    pub ctx: Ctx,
    pub model: Gpt,
    pub optimizer: Optimizer,
    pub scalars: Scalars,
    /// Steps done.
    pub step: u64,
    /// Windows consumed: where the data goes on.
    pub cursor: u64,
    pub dropout: f32,
    pub seed: u64,
    guard: Guard,
}

impl Trainer {
    pub fn new(ctx: Ctx, model: Gpt, settings: Settings, dropout: f32, seed: u64) -> Result<Self> {
        let optimizer = Optimizer::new(&model, settings)?;
        let guard = Guard { max_norm: settings.clip, spike_threshold: settings.spike_threshold, ..Guard::default() };
        let scalars = Scalars::new();
        scalars.set(Scalar::EmaDecay, settings.ema)?;
        Ok(Self { ctx, model, optimizer, scalars, step: 0, cursor: 0, dropout, seed, guard })
    }

    /// Forward and backward of every micro-batch under an objective, then one update. The loss is the sum over the valid targets of all of
    /// them over their number, so that 1 x 8 is 8 x 1.
    pub fn train_step(
        &mut self,
        objective: &mut dyn Objective,
        batches: &[Batch],
        learning_rate: f64,
    ) -> Result<StepRecord> {
        let valid: usize = batches.iter().map(Batch::valid).sum();
        let scale = 1.0 / valid.max(1) as f32;
        self.model.trainable().for_each(|p| p.clear_gradient());
        self.scalars.set(Scalar::LearningRate, learning_rate as f32)?;
        self.scalars.set(Scalar::Loss, 0.0)?;
        for (micro, batch) in batches.iter().enumerate() {
            let dropout = Dropout::new(self.dropout, self.seed, self.step, micro as u64);
            let loss = objective.accumulate(&mut self.ctx, &self.model, batch, scale, dropout)?;
            self.scalars.add(&mut self.ctx, Scalar::Loss, &loss)?;
            self.ctx.commit()?;
        }
        let gradients = self.gradients()?;
        gradient_norm::forward(&mut self.ctx, &gradients, self.scalars.tensor())?;
        guard::decide(&mut self.ctx, self.scalars.tensor(), self.guard)?;
        self.optimizer.step(&mut self.ctx, &self.model, self.scalars.tensor())?;
        guard::finish(&mut self.ctx, self.scalars.tensor())?;
        self.model.trainable().for_each(|p| p.touch());
        self.step += 1;
        self.record(learning_rate)
    }

    /// Every trained parameter's gradient; one without any is a hole in the model, never something to pass over.
    fn gradients(&self) -> Result<Vec<Tensor>> {
        self.model
            .trainable()
            .map(|p| match p.has_gradient() {
                true => Ok(p.gradient().clone()),
                false => {
                    Err(Error::op("train_step", "a gradient for every parameter", format!("none for {}", p.name())))
                }
            })
            .collect()
    }

    fn record(&self, learning_rate: f64) -> Result<StepRecord> {
        Ok(StepRecord {
            step: self.step,
            loss: self.scalars.get(Scalar::Loss)?,
            gradient_norm: self.scalars.get(Scalar::GradientNorm)?,
            learning_rate,
            skipped: self.scalars.get(Scalar::Skip)? != 0.0,
        })
    }

    /// Everything that resuming needs but the scalars: the trained weights, and the optimizer's state as "kind.name".
    pub fn state(&self) -> Result<(Vec<NamedTensor>, Vec<NamedTensor>)> {
        let mut optimizer = Vec::new();
        for (kind, tensors) in self.optimizer.state() {
            for (parameter, tensor) in self.model.trainable().zip(tensors) {
                let Some(tensor) = tensor else { continue };
                let named = |t: NamedTensor| NamedTensor { name: format!("{kind}.{}", t.name), ..t };
                optimizer.extend(parameter.split(tensor)?.into_iter().map(named));
            }
        }
        Ok((self.model.tensors()?, optimizer))
    }

    /// Fills what `state` gives from two sources of the same names.
    pub fn restore(&mut self, weights: &mut Source, optimizer: &mut Source) -> Result<()> {
        self.fill_weights(weights)?;
        for (kind, tensors) in self.optimizer.state() {
            for (parameter, tensor) in self.model.trainable().zip(tensors) {
                let Some(tensor) = tensor else { continue };
                fill(parameter, tensor, &mut |name, shape| optimizer(&format!("{kind}.{name}"), shape))?;
            }
        }
        Ok(())
    }

    fn fill_weights(&self, weights: &mut Source) -> Result<()> {
        for parameter in self.model.trainable() {
            fill(parameter, parameter.master(), &mut |name, shape| weights(name, shape))?;
            parameter.touch();
        }
        Ok(())
    }

    /// Takes trained weights as they were exported; the averages, if they are kept, become the same.
    pub fn take(&mut self, weights: &mut Source) -> Result<()> {
        self.fill_weights(weights)?;
        for (parameter, average) in self.model.trainable().zip(self.optimizer.averages()) {
            let from = storage::read::<f32>("take", parameter.master())?;
            storage::write::<f32>("take", average)?.copy_from_slice(&from);
        }
        Ok(())
    }

    /// Runs `f` on the model as it is exported: with the averaged weights, if they are kept, and products in f32.
    pub fn as_exported<R>(&mut self, f: impl FnOnce(&mut Ctx, &Gpt) -> Result<R>) -> Result<R> {
        let precision = self.ctx.precision();
        self.swap_average()?;
        self.ctx.set_precision(Precision::F32);
        let result = f(&mut self.ctx, &self.model);
        self.ctx.set_precision(precision);
        self.swap_average()?;
        result
    }

    /// Puts the averaged weights in place of the trained ones, or back: the same call undoes itself. Nothing without EMA.
    pub fn swap_average(&mut self) -> Result<()> {
        for (parameter, average) in self.model.trainable().zip(self.optimizer.averages()) {
            let mut a = storage::write::<f32>("swap_average", parameter.master())?;
            let mut b = storage::write::<f32>("swap_average", average)?;
            a.swap_with_slice(&mut b);
            drop((a, b));
            parameter.touch();
        }
        Ok(())
    }
}

/// Fills a tensor of a parameter's shape, row range by row range.
fn fill(parameter: &Parameter, tensor: &Tensor, source: &mut Source) -> Result<()> {
    let mut data = Vec::with_capacity(tensor.elem_count());
    for part in &parameter.parts {
        let mut shape = tensor.dims().to_vec();
        shape[0] = part.rows.len();
        data.extend(source(&part.name, &shape)?);
    }
    storage::write::<f32>("restore", tensor)?.copy_from_slice(&data);
    Ok(())
}
