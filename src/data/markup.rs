//! HTML and epub to text. Called by `format`.

use std::io::{Cursor, Read};

use zip::ZipArchive;

use super::format::MOST_RECORD;

/// Lines are as long as their paragraphs: the text is for reading on, not for a terminal.
const WIDTH: usize = 1 << 20;

/// The text of a page, without scripts and styles.
pub fn html(page: &str) -> Result<String, String> {
    let config = html2text::config::plain_no_decorate().raw_mode(true).no_link_wrapping().allow_width_overflow();
    let text = config.string_from_read(page.as_bytes(), WIDTH).map_err(|e| e.to_string())?;
    Ok(text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n").trim().to_owned())
}

/// The chapters of a book in their order of reading.
pub fn epub(book: Vec<u8>) -> Result<String, String> {
    let mut archive = ZipArchive::new(Cursor::new(book)).map_err(|e| e.to_string())?;
    let mut left = MOST_RECORD;
    let container = member(&mut archive, "META-INF/container.xml", &mut left)?;
    let container = xml(&container)?;
    let package = container.descendants().find_map(|n| n.attribute("full-path")).ok_or("no package")?.to_owned();
    let text = member(&mut archive, &package, &mut left)?;
    let document = xml(&text)?;
    let item = |id: &str| document.descendants().find(|n| n.has_tag_name_any("item") && n.attribute("id") == Some(id));
    let folder = package.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut chapters = Vec::new();
    for id in document.descendants().filter(|n| n.has_tag_name_any("itemref")).filter_map(|n| n.attribute("idref")) {
        let Some(href) = item(id).and_then(|n| n.attribute("href")) else { continue };
        let name = joined(folder, &percent_decoded(href));
        let page = member(&mut archive, &name, &mut left)?;
        chapters.push(html(&page)?);
    }
    chapters.retain(|text| !text.is_empty());
    if chapters.is_empty() { Err("no chapters".into()) } else { Ok(chapters.join("\n\n")) }
}

trait TagName {
    /// Whether it is an element of that name in any namespace.
    fn has_tag_name_any(&self, name: &str) -> bool;
}

impl TagName for roxmltree::Node<'_, '_> {
    fn has_tag_name_any(&self, name: &str) -> bool {
        self.is_element() && self.tag_name().name() == name
    }
}

fn xml(text: &str) -> Result<roxmltree::Document<'_>, String> {
    let options = roxmltree::ParsingOptions { allow_dtd: true, nodes_limit: 1 << 20, ..Default::default() };
    roxmltree::Document::parse_with_options(text.trim_start_matches('\u{FEFF}'), options).map_err(|e| e.to_string())
}

/// A member's text; all that a book holds together is bounded.
fn member(archive: &mut ZipArchive<Cursor<Vec<u8>>>, name: &str, left: &mut u64) -> Result<String, String> {
    let file = archive.by_name(name).map_err(|e| format!("{name}: {e}"))?;
    let mut text = Vec::new();
    let n = file.take(*left + 1).read_to_end(&mut text).map_err(|e| format!("{name}: {e}"))? as u64;
    *left = left.checked_sub(n).ok_or("chapters that are too long")?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A path relative to a folder of the archive.
fn joined(folder: &str, href: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in href.split('#').next().unwrap_or_default().split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut decoded, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let hex = bytes.get(at + 1..at + 3).filter(|_| bytes[at] == b'%').and_then(|h| std::str::from_utf8(h).ok());
        match hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
            Some(byte) => {
                decoded.push(byte);
                at += 3;
            }
            None => {
                decoded.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}
