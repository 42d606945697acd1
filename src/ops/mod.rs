//! One operation a file: its forward, its backward, and a plain reference that the tests hold both against.
pub mod adamw;
pub mod add;
pub mod cross_entropy;
pub mod ctx;
pub mod embedding;
pub mod gemm;
pub mod gradient_norm;
pub mod guard;
pub mod heads;
pub mod linear;
pub mod muon;
pub mod rms_norm;
pub mod scalars;
pub mod simd;
pub mod storage;
pub mod swiglu;
