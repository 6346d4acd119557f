//! Decompresses a file from its start.

use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;

use flate2::bufread::GzDecoder;

use super::Compression;
use super::json_array::peek_after;
use crate::DataError;
use crate::byte_source::{ByteSource, RangeReader};
use crate::cancel::CancelToken;

/// The largest window of a Zstandard file, as a power of two: that of `zstd --long=31`, the largest that zstd makes.
/// While such a file is open, its decoder holds a window in memory, which grows with what is decompressed.
const MAX_WINDOW_LOG: u32 = 31;

/// Returns a reader of the decompressed file.
pub(super) fn decompress(
    source: &Arc<dyn ByteSource>,
    compression: Compression,
    cancel: &CancelToken,
) -> Result<Box<dyn BufRead + Send>, DataError> {
    let compressed = RangeReader::new(Arc::clone(source), 0, u64::MAX);
    let cancel = cancel.clone();
    Ok(match compression {
        Compression::None => Box::new(compressed),
        Compression::Gzip => {
            let decoder = PaddedGzip { member: Some(GzDecoder::new(compressed)) };
            Box::new(BufReader::new(CancellableReader { decoder, cancel }))
        }
        Compression::Zstd => {
            let window = |mut decoder: zstd::Decoder<'static, RangeReader>| {
                decoder.window_log_max(MAX_WINDOW_LOG).map(|()| decoder)
            };
            let decoder = zstd::Decoder::with_buffer(compressed).and_then(window);
            let decoder = decoder.map_err(DataError::decoding(source.name()))?;
            Box::new(BufReader::new(CancellableReader { decoder, cancel }))
        }
    })
}

/// Decompresses the members of a gzip file. Zeros after a member, with which tapes and archives are filled up, are
/// ignored, as Python's gzip does.
struct PaddedGzip<R> {
    /// The member being read; `None` at the end of the file.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> Read for PaddedGzip<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let Some(member) = &mut self.member {
            let read = member.read(buffer)?;
            if read > 0 || buffer.is_empty() {
                return Ok(read);
            }
            if peek_after(member.get_mut(), |byte| *byte == 0)?.is_some() {
                self.member = self.member.take().map(|member| GzDecoder::new(member.into_inner()));
            } else {
                self.member = None;
            }
        }
        Ok(0)
    }
}

/// Stops decompressing once its token is cancelled: a few compressed bytes may expand to gigabytes.
struct CancellableReader<R> {
    decoder: R,
    cancel: CancelToken,
}

impl<R: Read> Read for CancellableReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.cancel.check()?;
        self.decoder.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::byte_source::testing::MemoryFile;

    fn member(text: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(text).unwrap();
        encoder.finish().unwrap()
    }

    fn read(bytes: Vec<u8>, compression: Compression) -> Result<Vec<u8>, io::Error> {
        let source: Arc<dyn ByteSource> = MemoryFile::new(bytes, 7);
        let mut text = Vec::new();
        let mut reader = decompress(&source, compression, &CancelToken::new()).map_err(io::Error::other)?;
        reader.read_to_end(&mut text).map(|_| text)
    }

    #[test]
    fn zeros_between_and_after_gzip_members_are_ignored() {
        let (zeros, more) = (vec![0; 700], [member(b"one "), vec![0; 20], member(b""), member(b"two")].concat());
        assert_eq!(read([more, zeros].concat(), Compression::Gzip).unwrap(), b"one two");
    }

    #[test]
    fn other_bytes_after_gzip_members_are_errors() {
        let cut = |bytes: &[u8]| bytes[..bytes.len() - 3].to_vec();
        for bytes in [[member(b"one"), b"x".to_vec()].concat(), cut(&member(b"one")), vec![0; 30]] {
            assert!(read(bytes.clone(), Compression::Gzip).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn zstd_windows_of_2_gib_are_read() {
        let text = b"a line\n".repeat(1000);
        for window_log in [27, 28, 31] {
            let mut encoder = zstd::Encoder::new(Vec::new(), 1).unwrap();
            encoder.include_contentsize(false).unwrap();
            encoder.long_distance_matching(true).unwrap();
            encoder.window_log(window_log).unwrap();
            encoder.write_all(&text).unwrap();
            let bytes = encoder.finish().unwrap();
            assert_eq!(read(bytes, Compression::Zstd).unwrap(), text, "{window_log}");
        }
    }
}
