//! Parity of every op: forward and backward against its plain reference and candle's autograd, over odd shapes, large
//! magnitudes and every kernel family of this machine. One binary, one file an op.
mod support;

mod attention;
mod cross_entropy;
mod distillation;
mod dropout;
mod embedding;
mod linear;
mod lora;
mod optimizer;
mod rms_norm;
mod rotary;
mod swiglu;
