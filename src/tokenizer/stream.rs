//! Bytes to text while they arrive, without ever splitting a character.

/// Holds back the bytes of a character that is not complete yet.
#[derive(Clone, Debug, Default)]
pub struct Utf8 {
    pending: Vec<u8>,
}

impl Utf8 {
    /// All characters that are complete now; bytes that cannot become one are U+FFFD.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            let end = rest + chunk.valid().len() + chunk.invalid().len();
            // Only the very end may still be the start of a character.
            if end == self.pending.len() && may_continue(chunk.invalid()) {
                rest += chunk.valid().len();
                break;
            }
            if !chunk.invalid().is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
            rest = end;
        }
        self.pending.drain(..rest);
        text
    }

    /// What is left at the end of a text: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&rest).into_owned()
    }
}

/// Whether more bytes could make `tail` (not valid as it is) a character.
fn may_continue(tail: &[u8]) -> bool {
    !tail.is_empty() && std::str::from_utf8(tail).is_err_and(|e| e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_split_of_a_text_gives_the_text() {
        let text = "aé€😀\u{0301}漢b";
        let bytes = text.as_bytes();
        for a in 0..=bytes.len() {
            for b in a..=bytes.len() {
                let mut stream = Utf8::default();
                let parts = [&bytes[..a], &bytes[a..b], &bytes[b..]].map(|p| stream.push(p));
                assert!(parts.iter().all(|p| !p.contains('\u{FFFD}')));
                assert_eq!(parts.concat() + &stream.finish(), text);
            }
        }
    }

    #[test]
    fn emoji_byte_by_byte_appears_once_whole() {
        let mut stream = Utf8::default();
        let said: Vec<String> = "😀".bytes().map(|b| stream.push(&[b])).collect();
        assert_eq!(said, ["", "", "", "😀"]);
    }

    #[test]
    fn truncated_and_invalid_bytes_are_replaced_not_lost() {
        let mut stream = Utf8::default();
        assert_eq!(stream.push(&"😀".as_bytes()[..3]), "");
        assert_eq!(stream.finish(), "\u{FFFD}");
        assert_eq!(stream.push(&[b'a', 0xFF, b'b', 0xC3]), "a\u{FFFD}b");
        assert_eq!(stream.push(b"c"), "\u{FFFD}c");
    }

    #[test]
    fn broken_text_reads_the_same_however_it_arrives() {
        let broken: [&[u8]; 5] = [
            b"a\xE2\x82b\xF0\x9F\x98",
            b"\xF0\x9F\x98\x80\xC3\xFF\xE2\x82\xAC\xC3",
            b"\xED\xA0\x80x\xF4\x90\x80\x80",
            b"\x80\x80\xC0\xAFz\xE2",
            b"\0\xF0\x80\x80\x80",
        ];
        for bytes in broken {
            let whole = String::from_utf8_lossy(bytes);
            for a in 0..=bytes.len() {
                for b in a..=bytes.len() {
                    let mut stream = Utf8::default();
                    let text = [&bytes[..a], &bytes[a..b], &bytes[b..]].map(|p| stream.push(p)).concat();
                    assert_eq!(text + &stream.finish(), whole, "{bytes:?} at {a}, {b}");
                }
            }
        }
    }
}
