//! The texts of the kernels, as they are compiled at run time: the prelude before each file.

macro_rules! sources {
    ($($file:literal),* $(,)?) => {
        &[$(($file, include_str!(concat!("../../../kernels/metal/", $file, ".metal")))),*]
    };
}

const PRELUDE: &str = include_str!("../../../kernels/metal/prelude.metal");

/// Every kernel file.
pub const FILES: &[(&str, &str)] = sources![
    "adamw",
    "add",
    "attend",
    "attention",
    "blocks",
    "cross_entropy",
    "distillation",
    "dropout",
    "embedding",
    "gradient_norm",
    "guard",
    "lora",
    "muon",
    "noise",
    "page",
    "rms_norm",
    "rotary",
    "skinny",
    "swiglu",
];

/// The whole text of a file, which must be one of `FILES`.
pub fn text(file: &str) -> String {
    let (_, own) = FILES.iter().find(|(name, _)| *name == file).expect("the table of kernels names files of this list");
    // The compiler's line numbers are those of the file.
    format!("{PRELUDE}\n#line 1 \"{file}.metal\"\n{own}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_of_the_table_has_a_source() {
        for kernel in super::super::kernels::ALL {
            assert!(text(kernel.file).contains(kernel.name), "{}", kernel.file);
        }
    }
}
