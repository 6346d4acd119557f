//! TFRecord framing and the event messages of TensorBoard.
//!
//! A record is `length (u64) | masked CRC of length (u32) | data | masked CRC of data (u32)`, little-endian, with
//! CRC32C masked as in <https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details>. The
//! messages are the few fields of TensorFlow's `event.proto`, `summary.proto`, `tensor.proto` and `tensor_shape.proto` that
//! scalars and texts need.

use prost::Message;

/// One record of TensorBoard's event file.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    pub(super) wall_time: f64,
    /// The optimizer step.
    #[prost(int64, tag = "2")]
    pub(super) step: i64,
    #[prost(oneof = "EventPayload", tags = "3, 5")]
    pub(super) what: Option<EventPayload>,
    /// In the first record of a file, what wrote it.
    #[prost(message, optional, tag = "10")]
    pub(super) source_metadata: Option<SourceMetadata>,
}

/// `SourceMetadata`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SourceMetadata {
    /// The program or the library that wrote the file.
    #[prost(string, tag = "1")]
    pub(super) writer: String,
}

/// The content of an event.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(super) enum EventPayload {
    /// `brain.Event:2`, the first record of a file.
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
}

/// The values of one step.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(super) value: Vec<Value>,
}

/// A scalar or a text, and its name.
#[derive(Clone, PartialEq, Message)]
#[expect(clippy::struct_field_names, reason = "TensorFlow's name")]
pub(super) struct Value {
    #[prost(string, tag = "1")]
    pub(super) tag: String,
    /// The value of a scalar. In TensorFlow a field of a `oneof`: it is written even when it is zero.
    #[prost(float, optional, tag = "2")]
    pub(super) simple_value: Option<f32>,
    /// The value of a text, another field of that `oneof`.
    #[prost(message, optional, tag = "8")]
    pub(super) tensor: Option<TextTensor>,
    /// Which dashboard shows a tensor.
    #[prost(message, optional, tag = "9")]
    pub(super) metadata: Option<Metadata>,
}

impl Value {
    pub(super) fn scalar(tag: String, value: f32) -> Self {
        Self { tag, simple_value: Some(value), ..Self::default() }
    }

    /// Returns a value for the text dashboard, which renders Markdown.
    pub(super) fn text(tag: &str, markdown: &str) -> Self {
        let plugin = Plugin { plugin_name: "text".to_owned() };
        Self {
            tag: tag.to_owned(),
            simple_value: None,
            tensor: Some(TextTensor {
                dtype: DT_STRING,
                shape: Some(Shape { dim: vec![Dimension { size: 1 }] }),
                string_val: vec![markdown.as_bytes().to_vec()],
            }),
            metadata: Some(Metadata { plugin_data: Some(plugin), data_class: DATA_CLASS_TENSOR }),
        }
    }
}

/// `DataType` of `types.proto`.
const DT_STRING: i32 = 7;
/// `DataClass` of `summary.proto`.
const DATA_CLASS_TENSOR: i32 = 2;

/// `SummaryMetadata`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Metadata {
    #[prost(message, optional, tag = "1")]
    plugin_data: Option<Plugin>,
    #[prost(int32, tag = "4")]
    data_class: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Plugin {
    #[prost(string, tag = "1")]
    plugin_name: String,
}

/// A `TensorProto` of strings.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TextTensor {
    #[prost(int32, tag = "1")]
    dtype: i32,
    #[prost(message, optional, tag = "2")]
    shape: Option<Shape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    string_val: Vec<Vec<u8>>,
}

/// `TensorShapeProto`.
#[derive(Clone, PartialEq, Message)]
struct Shape {
    #[prost(message, repeated, tag = "2")]
    dim: Vec<Dimension>,
}

#[derive(Clone, PartialEq, Message)]
struct Dimension {
    #[prost(int64, tag = "1")]
    size: i64,
}

/// Bytes of a record before and after its data.
const HEAD: usize = 12;
const TAIL: usize = 4;

/// Returns an event as one framed record.
pub(super) fn record(event: &Event) -> Vec<u8> {
    let data = event.encode_to_vec();
    let length = (data.len() as u64).to_le_bytes();
    let mut record = Vec::with_capacity(HEAD + data.len() + TAIL);
    record.extend(length);
    record.extend(masked_crc(&length).to_le_bytes());
    record.extend(&data);
    record.extend(masked_crc(&data).to_le_bytes());
    record
}

/// Returns the events of a file up to its end or to the first record that is truncated or corrupted.
pub(super) fn read(mut bytes: &[u8]) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some((event, rest)) = read_one(bytes) {
        events.push(event);
        bytes = rest;
    }
    events
}

fn read_one(bytes: &[u8]) -> Option<(Event, &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<8>()?;
    let (length_crc, rest) = rest.split_first_chunk::<4>()?;
    if masked_crc(length) != u32::from_le_bytes(*length_crc) {
        return None;
    }
    let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    let (data, rest) = rest.split_at_checked(length)?;
    let (data_crc, rest) = rest.split_first_chunk::<4>()?;
    if masked_crc(data) != u32::from_le_bytes(*data_crc) {
        return None;
    }
    Some((Event::decode(data).ok()?, rest))
}

/// Returns the masked CRC32C: rotated and offset, because the data may itself hold CRCs.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_matches_rfc_3720() {
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c::crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c::crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn a_record_matches_tensorflows_bytes() {
        // The first record of every file: tf.io.TFRecordWriter's framing of Event(wall_time=1.0,
        // file_version="brain.Event:2").
        let version = EventPayload::FileVersion("brain.Event:2".to_owned());
        let event = Event { wall_time: 1.0, what: Some(version), ..Event::default() };
        let bytes = record(&event);
        assert_eq!(&bytes[..8], 24_u64.to_le_bytes());
        assert_eq!(&bytes[12..36], b"\x09\0\0\0\0\0\0\xf0\x3f\x1a\x0dbrain.Event:2");
        assert_eq!(read(&bytes), [event]);
    }

    #[test]
    fn zero_is_encoded_explicitly() {
        let value = Value::scalar("loss/train".to_owned(), 0.0);
        assert_eq!(value.encode_to_vec(), b"\x0a\x0aloss/train\x15\0\0\0\0");
    }

    #[test]
    fn reading_stops_at_a_truncated_or_corrupted_record() {
        let events: Vec<_> = (1..=3).map(|step| Event { wall_time: 1.0, step, ..Event::default() }).collect();
        let mut bytes: Vec<u8> = events.iter().flat_map(record).collect();
        let record = bytes.len() / 3;
        for torn in 2 * record..bytes.len() {
            assert_eq!(read(&bytes[..torn]), events[..2]);
        }
        for byte in 2 * record..bytes.len() {
            bytes[byte] ^= 1;
            assert_eq!(read(&bytes), events[..2], "byte {byte}");
            bytes[byte] ^= 1;
        }
    }
}
