//! Files of every format that data come in, made for tests.

use std::io::{Cursor, Write};
use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;

pub fn zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in members {
        writer.start_file(*name, zip::write::SimpleFileOptions::default()).unwrap();
        writer.write_all(content).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

pub fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in members {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        // Written as it is, where `append_data` would refuse names that lead out of the folder.
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_cksum();
        builder.append(&header, *content).unwrap();
    }
    builder.into_inner().unwrap()
}

pub fn gzip(content: &[u8]) -> Vec<u8> {
    let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    writer.write_all(content).unwrap();
    writer.finish().unwrap()
}

pub fn zstd(content: &[u8]) -> Vec<u8> {
    zstd::encode_all(content, 1).unwrap()
}

/// A table of a number and a text, in two row groups; an empty text is a null.
pub fn parquet(column: &str, texts: &[&str]) -> Vec<u8> {
    let schema = format!("message m {{ REQUIRED INT64 id; OPTIONAL BYTE_ARRAY {column} (UTF8); }}");
    let schema = Arc::new(parse_message_type(&schema).unwrap());
    let mut file = Vec::new();
    let mut writer = SerializedFileWriter::new(&mut file, schema, Default::default()).unwrap();
    for texts in texts.chunks(texts.len().div_ceil(2)) {
        let mut group = writer.next_row_group().unwrap();
        let mut numbers = group.next_column().unwrap().unwrap();
        let ids: Vec<i64> = (0..texts.len() as i64).collect();
        numbers.typed::<Int64Type>().write_batch(&ids, None, None).unwrap();
        numbers.close().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let levels: Vec<i16> = texts.iter().map(|t| i16::from(!t.is_empty())).collect();
        let values: Vec<ByteArray> = texts.iter().filter(|t| !t.is_empty()).map(|t| ByteArray::from(*t)).collect();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
    file
}

pub fn epub(chapters: &[&str]) -> Vec<u8> {
    let container = r#"<?xml version="1.0"?><container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>
        <rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"#;
    let item = |i: usize| format!(r#"<item id="c{i}" href="text/chapter%20{i}.xhtml"/>"#);
    let items: String = (0..chapters.len()).map(item).collect();
    // The order of reading is not that of the files.
    let spine: String = (0..chapters.len()).rev().map(|i| format!(r#"<itemref idref="c{i}"/>"#)).collect();
    let package = format!(
        r#"<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>"#
    );
    let names: Vec<String> = (0..chapters.len()).map(|i| format!("OEBPS/text/chapter {i}.xhtml")).collect();
    let mut members: Vec<(&str, &[u8])> =
        vec![("META-INF/container.xml", container.as_bytes()), ("OEBPS/book.opf", package.as_bytes())];
    members.extend(names.iter().zip(chapters).map(|(name, text)| (name.as_str(), text.as_bytes())));
    zip(&members)
}
