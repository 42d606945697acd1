//! Training: the step, the optimizer, the learning rate, the loop. Called by the recipes.
pub mod curve;
pub mod fit;
pub mod objective;
pub mod optimizer;
pub mod schedule;
pub mod step;
