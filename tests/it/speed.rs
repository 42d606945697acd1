//! Floors under the speed: shares of what a large product and a plain read reach in the same process, far below what is
//! usual (a third to nine tenths), so that only a real loss fails and noise does not.

use crate::command::Place;

fn share(args: &[&str], key: &str) -> f64 {
    let json = Place::new().run(args).json();
    json[key].as_f64().unwrap_or_else(|| panic!("no {key} in {json}"))
}

#[test]
#[cfg_attr(debug_assertions, ignore = "only optimised code is fast")]
fn training_and_decoding_keep_their_share_of_the_machine() {
    let bench = |mode: &'static str, rest: &[&'static str]| [&["bench", mode, "--json"], rest].concat();
    for dtype in ["f32", "bf16"] {
        let args = bench("train", &["--batch", "12", "--context", "64", "--dtype", dtype]);
        let share = share(&args, "matmul_share");
        assert!(share > 0.08, "training in {dtype} reaches {share} of the product's rate");
    }
    for kind in ["f32", "bf16", "q8_0", "q4_0"] {
        let args = bench("decode", &["--preset", "medium", "--steps", "30", "--type", kind]);
        let share = share(&args, "stream_share");
        assert!(share > 0.05, "decoding in {kind} reaches {share} of the rate of reading");
    }
}
