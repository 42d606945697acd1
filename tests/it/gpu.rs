//! What is said of GPUs where there is none, and what is counted without one.

use crate::command::Place;

#[test]
fn a_token_on_a_gpu_is_counted_anywhere() {
    let place = Place::new();
    for (batch, back) in [("1", 4.0), ("3", 12.0)] {
        let flags = ["bench", "decode", "--preset", "tiny", "--count", "--json", "--batch", batch, "--tokens", "5"];
        let counted = place.run(&flags).ok().json();
        assert_eq!(counted["dispatches_per_layer"], 7.0);
        assert_eq!((&counted["command_buffers"], &counted["uploaded_bytes"]), (&1.0.into(), &0.0.into()));
        assert_eq!(counted["downloaded_bytes"], back);
    }
}

#[test]
#[cfg(not(target_os = "macos"))]
fn the_self_test_of_a_gpu_says_where_it_can_run() {
    let done = Place::new().run(&["doctor", "--metal"]);
    assert_eq!(done.code, Some(1));
    assert!(done.stderr.contains("not for a Mac"), "{}", done.stderr);
}
