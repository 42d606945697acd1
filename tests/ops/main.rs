//! Parity of every op: forward and backward against its plain reference and candle's autograd, over odd shapes, large
//! magnitudes, every kernel family of this machine, and the Metal kernels in an emulator of their language. One binary, one file an op.
#[path = "../msl/emulator.rs"]
#[allow(dead_code)]
mod emulator;
mod support;
#[path = "../msl/translate.rs"]
#[allow(dead_code)]
mod translate;

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
