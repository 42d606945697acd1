//! embedding against its reference and candle's autograd.

use candle_core::{Device, Tensor, Var};
use gpt::ops::blocks::{BlockMatrix, Format};
use gpt::ops::ctx::Ctx;
use gpt::ops::embedding;
use gpt::ops::gemm::Store;
use gpt::ops::linear::Weight;
use gpt::ops::simd::Family;
use gpt::random::{Purpose, Stream};

use super::support::{assert_close, contexts, normal_tensor, values};

/// Ids as in text: half of them are one id, so that its row sums many positions.
fn ids(n: usize, vocab: usize) -> Vec<u32> {
    let stream = Stream::new(2, Purpose::Test);
    (0..n as u32).map(|i| if i % 2 == 0 { vocab as u32 / 2 } else { stream.word(0, i) % vocab as u32 }).collect()
}

fn plain_weight(tensor: &Tensor) -> Weight<'_> {
    Weight::Dense { tensor, kept: None }
}

#[test]
fn forward_and_gradient_are_those_of_autograd() {
    for mut ctx in contexts() {
        for (n, vocab, channels) in [(1, 5, 6), (3, 320, 33), (65, 1000, 128), (1030, 5, 33), (0, 5, 6)] {
            let what = format!("{} {n} of ({vocab}, {channels})", ctx.family().name());
            let table = Var::from_tensor(&normal_tensor(1, &[vocab, channels])).unwrap();
            let (ids, dy) = (ids(n, vocab), normal_tensor(2, &[n, channels]));
            let y = embedding::forward(&mut ctx, plain_weight(&table), &ids).unwrap();
            assert_eq!(values(&y), embedding::reference(&values(&table), &ids, channels), "{what}");
            let plain = embedding::backward_reference(&ids, &values(&dy), vocab, channels);
            let plain: Vec<f32> = plain.iter().map(|x| *x as f32).collect();
            if n > 0 {
                let index = Tensor::from_slice(&ids, n, &Device::Cpu).unwrap();
                let selected = table.index_select(&index, 0).unwrap();
                assert_eq!(values(&selected), values(&y), "{what}");
                let grads = (selected * &dy).unwrap().sum_all().unwrap().backward().unwrap();
                // Both sum up to n numbers of size one in f32.
                assert_close(&what, &values(grads.get(&table).unwrap()), &plain, 3e-5);
            }
            for store in [Store::Set, Store::Add] {
                let dtable = normal_tensor(3, &[vocab, channels]);
                let keep = if store == Store::Add { values(&dtable) } else { vec![0.0; vocab * channels] };
                let want: Vec<f32> = plain.iter().zip(keep).map(|(x, k)| x + k).collect();
                embedding::backward(&mut ctx, &ids, &dy, (&dtable, store)).unwrap();
                assert_close(&what, &values(&dtable), &want, 3e-5);
            }
        }
    }
}

#[test]
fn a_table_in_blocks_gives_the_rows_that_they_stand_for() {
    let table = values(&normal_tensor(1, &[40, 64]));
    for (mut ctx, format) in contexts().into_iter().zip([Format::Q8_0, Format::Q4_0].into_iter().cycle()) {
        let blocks = BlockMatrix::quantize(format, &table, 64).unwrap();
        let mut whole = vec![0.0; table.len()];
        blocks.unpack(ctx.family(), &mut whole);
        let y = embedding::forward(&mut ctx, Weight::Blocks(&blocks), &[3, 39, 0, 3]).unwrap();
        assert_eq!(values(&y), embedding::reference(&whole, &[3, 39, 0, 3], 64));
        assert!(embedding::forward(&mut ctx, Weight::Blocks(&blocks), &[40]).is_err());
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let (ids, dy) = (ids(1030, 65), normal_tensor(2, &[1030, 33]));
    let run = |threads| {
        let mut ctx = Ctx::cpu(Family::detect());
        let dtable = normal_tensor(3, &[65, 33]);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| embedding::backward(&mut ctx, &ids, &dy, (&dtable, Store::Add))).unwrap();
        values(&dtable)
    };
    assert!(run(1) == run(2) && run(1) == run(3));
}

#[test]
fn an_id_outside_the_table_is_named() {
    let mut ctx = contexts().remove(0);
    let (table, dy) = (normal_tensor(1, &[5, 6]), normal_tensor(2, &[2, 6]));
    let message = embedding::forward(&mut ctx, plain_weight(&table), &[1, 5]).unwrap_err().to_string();
    assert!(message.contains("id 5 at position 1"), "{message}");
    assert!(
        embedding::backward(&mut ctx, &[7, 0], &dy, (&table, Store::Set)).unwrap_err().to_string().contains("id 7")
    );
}
