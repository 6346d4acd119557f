//! The header of a safetensors file: its length, then JSON with the type, the shape and the byte range of each tensor.

use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::error::failed;
use crate::{Error, Result};

/// The longest header that is read, as the format itself limits it.
const LONGEST_HEADER: u64 = 100_000_000;

/// The header of tensors (name, type, shape, bytes) that lie end to end.
pub(super) fn header(tensors: impl Iterator<Item = (String, Dtype, Vec<usize>, usize)>) -> Vec<u8> {
    let mut end = 0;
    let infos = tensors.map(|(name, dtype, shape, bytes)| {
        let start = end;
        end += bytes;
        (name, TensorInfo { dtype, shape, data_offsets: (start, end) })
    });
    // Transformers refuses a file that does not name its framework.
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), infos.collect()).expect("ranges laid end to end are a valid header");
    let mut json = serde_json::to_vec(&metadata).expect("a header always serialises");
    json.resize(json.len().next_multiple_of(8), b' ');
    [(json.len() as u64).to_le_bytes().as_slice(), &json].concat()
}

/// Reads the header of a file of `file_bytes`, and checks that the tensors it describes fill the file. `path` is for
/// messages only.
pub(crate) fn read_header(reader: &mut dyn Read, file_bytes: u64, path: &Path) -> Result<Metadata> {
    let malformed = |problem: String| Error::Malformed { path: path.to_owned(), problem };
    let mut length = [0; 8];
    let Some(behind_length) = file_bytes.checked_sub(length.len() as u64) else {
        return Err(malformed(format!("it has {file_bytes} bytes")));
    };
    reader.read_exact(&mut length).map_err(failed("read", path))?;
    if length == *b"version " {
        return Err(malformed("it is a pointer of Git LFS; `git lfs pull` downloads the file".to_owned()));
    }
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER.min(behind_length) {
        return Err(malformed(format!("it claims a header of {length} bytes in a file of {file_bytes}")));
    }
    let mut json = vec![0; length as usize];
    reader.read_exact(&mut json).map_err(failed("read", path))?;
    let metadata: Metadata = serde_json::from_slice(&json).map_err(|error| malformed(error.to_string()))?;
    let (expected, actual) = (metadata.data_len() as u64, behind_length - length);
    if expected != actual {
        return Err(malformed(format!("its header describes {expected} bytes of tensors, it holds {actual}")));
    }
    Ok(metadata)
}
