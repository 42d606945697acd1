//! The learning rate of a step: warm-up, then cosine, linear, warm-up-stable-decay, or constant.
//!
//! A pure function of the step number, so that resume cannot be off by one.

use crate::error::{Error, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    Cosine,
    Linear,
    /// Constant, then linear to the end over the last share (Hu et al., arXiv 2404.06395).
    Wsd,
    Constant,
}

impl Shape {
    pub const NAMES: [&'static str; 4] = ["cosine", "linear", "wsd", "constant"];

    pub fn named(name: &str) -> Result<Self> {
        match name {
            "cosine" => Ok(Shape::Cosine),
            "linear" => Ok(Shape::Linear),
            "wsd" => Ok(Shape::Wsd),
            "constant" => Ok(Shape::Constant),
            _ => Err(Error::usage(format!("unknown schedule `{name}`"))
                .with_hint(format!("one of: {}", Self::NAMES.join(", ")))),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    pub shape: Shape,
    /// The highest learning rate.
    pub peak: f64,
    /// Steps of linear warm-up; the first step already has peak / warmup.
    pub warmup: u64,
    /// Steps of the whole run.
    pub steps: u64,
    /// The learning rate at the end over the peak.
    pub final_fraction: f64,
    /// wsd: the share of the run over which the rate falls.
    pub decay_fraction: f64,
}

impl Schedule {
    /// The learning rate of `step`, counted from 0.
    pub fn learning_rate(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let span = |start: u64| {
            let length = self.steps.saturating_sub(start).max(1);
            (step.saturating_sub(start) as f64 / length as f64).min(1.0)
        };
        let fall = |share: f64| self.final_fraction + (1.0 - self.final_fraction) * share;
        self.peak
            * match self.shape {
                Shape::Constant => 1.0,
                Shape::Linear => fall(1.0 - span(self.warmup)),
                Shape::Cosine => fall(0.5 * (1.0 + (std::f64::consts::PI * span(self.warmup)).cos())),
                Shape::Wsd => {
                    let decay = (self.steps as f64 * self.decay_fraction).round() as u64;
                    fall(1.0 - span(self.steps.saturating_sub(decay).max(self.warmup)))
                }
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(shape: Shape) -> Schedule {
        Schedule { shape, peak: 1.0, warmup: 10, steps: 110, final_fraction: 0.1, decay_fraction: 0.2 }
    }

    #[test]
    fn every_shape_warms_up_and_ends_where_it_should() {
        for (shape, end) in [(Shape::Cosine, 0.1), (Shape::Linear, 0.1), (Shape::Wsd, 0.1), (Shape::Constant, 1.0)] {
            let s = schedule(shape);
            assert_eq!((s.learning_rate(0), s.learning_rate(9), s.learning_rate(10)), (0.1, 1.0, 1.0));
            assert!((s.learning_rate(110) - end).abs() < 1e-12);
            assert!((s.learning_rate(1000) - end).abs() < 1e-12, "past the end it stays");
        }
        assert!((schedule(Shape::Cosine).learning_rate(60) - 0.55).abs() < 1e-12);
        assert!((schedule(Shape::Linear).learning_rate(60) - 0.55).abs() < 1e-12);
        let wsd = schedule(Shape::Wsd);
        assert_eq!(wsd.learning_rate(88), 1.0);
        assert!((wsd.learning_rate(99) - 0.55).abs() < 1e-12);
    }

    #[test]
    fn no_warm_up_and_a_run_of_no_steps_divide_by_nothing() {
        let s = Schedule { warmup: 0, steps: 0, ..schedule(Shape::Cosine) };
        assert!(s.learning_rate(0).is_finite());
    }
}
