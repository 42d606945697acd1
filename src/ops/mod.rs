//! One operation a file: its forward, its backward, and a plain reference that the tests hold both against.
pub mod add;
pub mod ctx;
pub mod decode;
pub mod gemm;
pub mod heads;
pub mod simd;
pub mod storage;
