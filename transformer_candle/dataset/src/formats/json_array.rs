//! The elements of a JSON array, one after another, so that a file that is one array needs the memory of one element.

use std::io::{self, BufRead};

use super::json_row::JsonText;
use super::jsonl::MAX_LINE_BYTES;

/// Reads the elements of one array, or of several that follow each other.
pub(super) struct ArrayElements {
    position: Position,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Position {
    /// Before an array, or after it.
    Outside,
    /// After `[`.
    First,
    /// Before an element.
    Element,
    /// After an element.
    Between,
}

impl ArrayElements {
    pub(super) fn new() -> Self {
        Self { position: Position::Outside }
    }

    /// Moves before the next element; false after the last.
    pub(super) fn seek_element(&mut self, reader: &mut impl BufRead) -> io::Result<bool> {
        loop {
            let next = peek_after(reader, u8::is_ascii_whitespace)?;
            self.position = match (self.position, next) {
                (Position::Outside, None) => return Ok(false),
                (_, None) => return Err(invalid("the JSON array ends in the middle")),
                (Position::Outside, Some(b'[')) => Position::First,
                (Position::Outside, Some(_)) => return Err(invalid("text follows the JSON array")),
                (Position::First | Position::Between, Some(b']')) => Position::Outside,
                (Position::Between, Some(b',')) => Position::Element,
                (_, Some(b',' | b']')) => return Err(invalid("an element of the JSON array is missing")),
                _ => {
                    self.position = Position::Element;
                    return Ok(true);
                }
            };
            reader.consume(1);
        }
    }

    /// Reads the next element; `None` after the last. Of one with more than [`MAX_LINE_BYTES`] nothing is kept.
    pub(super) fn next(&mut self, reader: &mut impl BufRead) -> io::Result<Option<JsonText>> {
        if !self.seek_element(reader)? {
            return Ok(None);
        }
        self.position = Position::Between;
        let mut element = JsonText { bytes: Vec::new(), too_long: false };
        let mut end = ElementEnd::default();
        loop {
            let buffer = reader.fill_buf()?;
            if buffer.is_empty() {
                return Err(invalid("the JSON array ends in the middle"));
            }
            let length = end.find(buffer).unwrap_or(buffer.len());
            let complete = length < buffer.len();
            element.too_long |= (element.bytes.len() + length) as u64 > MAX_LINE_BYTES;
            if element.too_long {
                element.bytes = Vec::new();
            } else {
                element.bytes.extend_from_slice(&buffer[..length]);
            }
            reader.consume(length);
            if complete {
                return Ok(Some(element));
            }
        }
    }
}

/// Finds the comma or bracket after an element, in buffers that follow each other.
#[derive(Default)]
struct ElementEnd {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl ElementEnd {
    fn find(&mut self, buffer: &[u8]) -> Option<usize> {
        buffer.iter().position(|&byte| {
            if self.in_string {
                self.in_string = self.escaped || byte != b'"';
                self.escaped = !self.escaped && byte == b'\\';
                return false;
            }
            match byte {
                b'"' => self.in_string = true,
                b',' | b']' if self.depth == 0 => return true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
            false
        })
    }
}

/// Skips bytes that fulfil a condition; returns the next one without reading it.
pub(super) fn peek_after(reader: &mut impl BufRead, is_skipped: impl Fn(&u8) -> bool) -> io::Result<Option<u8>> {
    loop {
        let buffer = reader.fill_buf()?;
        let skipped = buffer.iter().take_while(|byte| is_skipped(byte)).count();
        let (next, is_end) = (buffer.get(skipped).copied(), buffer.is_empty());
        reader.consume(skipped);
        if next.is_some() || is_end {
            return Ok(next);
        }
    }
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn elements(text: &[u8], buffer: usize) -> io::Result<Vec<Vec<u8>>> {
        let (mut reader, mut array) = (BufReader::with_capacity(buffer, text), ArrayElements::new());
        let mut elements = Vec::new();
        while let Some(element) = array.next(&mut reader)? {
            elements.push(element.bytes);
        }
        Ok(elements)
    }

    #[test]
    fn several_arrays_follow_each_other() {
        let elements = elements(b" [ 1 , \"a]\\\"\" ]\n[]\n[{\"b\": [2, 3]}]\n", 3).unwrap();
        assert_eq!(elements, [b"1 ".as_slice(), b"\"a]\\\"\" ", b"{\"b\": [2, 3]}"]);
    }

    #[test]
    fn what_is_no_array_is_an_error() {
        let cases = [
            ("[1, 2", "middle"),
            ("[{\"a\": \"", "middle"),
            ("[1,]", "missing"),
            ("[,1]", "missing"),
            ("[1] x", "follows"),
        ];
        for (text, problem) in cases {
            let error = elements(text.as_bytes(), 4).unwrap_err().to_string();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }

    #[test]
    fn overlong_elements_are_dropped() {
        let text = format!("[\"{}\", 1]", "a".repeat(MAX_LINE_BYTES as usize));
        let (mut reader, mut array) = (text.as_bytes(), ArrayElements::new());
        assert!(array.next(&mut reader).unwrap().unwrap().too_long);
        assert_eq!(array.next(&mut reader).unwrap().unwrap().bytes, b"1");
        assert!(array.next(&mut reader).unwrap().is_none());
    }

    fn any_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i32>().prop_map(Value::from),
            "[a\"\\\\\\[\\]{},\n ]{0,6}".prop_map(Value::from)
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map("[a\\]}]{0,2}", inner, 0..4).prop_map(|map| json!(map)),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn elements_are_those_that_serde_json_parses(values in proptest::collection::vec(any_value(), 0..5), pretty: bool, buffer in 1_usize..9) {
            let text = if pretty { serde_json::to_vec_pretty(&values) } else { serde_json::to_vec(&values) }.unwrap();
            let values_read: Vec<Value> = elements(&text, buffer)
                .unwrap()
                .iter()
                .map(|bytes| serde_json::from_slice(bytes).unwrap())
                .collect();
            prop_assert_eq!(values_read, values);
        }
    }
}
