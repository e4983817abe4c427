// The licences of all that is inside the executable.
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join, resolve } from 'node:path';

const LINE = '='.repeat(120);

/** The text for a bundle, from esbuild's metafile: baton, Node, then each package by name. */
export function licenseText(root, metafile) {
  const inside = Object.keys(metafile.inputs)
    .map(packageFolder)
    .filter((folder) => folder !== undefined);
  const packages = [...new Set(inside.map((folder) => resolve(root, folder)))].map(readPackage);
  packages.sort((a, b) => (a.title < b.title ? -1 : 1));
  const own = { title: 'baton', text: readFileSync(join(root, 'LICENSE'), 'utf8') };
  const all = [own, readNode(root), ...packages, ...readZeromq(root)];
  const list = all.map(({ title }) => `  ${title}`).join('\n');
  const body = all.map(({ title, text }) => `${LINE}\n${title}\n${LINE}\n\n${text.trim()}\n`).join('\n');
  return `This executable contains:\n\n${list}\n\n${body}`;
}

/** The innermost package that a file is of. */
function packageFolder(file) {
  return /^(?:[\w-]+:)?(.*node_modules\/(?:@[^/]+\/)?[^/]+)\//.exec(file)?.[1];
}

function readPackage(folder) {
  const { name, version, license, author } = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'));
  const files = readdirSync(folder)
    .filter((file) => /^(licen[cs]e|notice|copying)/i.test(file))
    .sort();
  const title = `${name} ${version} (${typeof license === 'string' ? license : 'see below'})`;
  if (files.length > 0)
    return { title, text: files.map((file) => readFileSync(join(folder, file), 'utf8')).join('\n\n') };
  // Some packages name their licence and leave its text out.
  const readme = readdirSync(folder).find((file) => /^readme/i.test(file));
  const section =
    readme === undefined
      ? undefined
      : /^#+ *licen[cs]e[^\n]*\n([\s\S]*)/im.exec(readFileSync(join(folder, readme), 'utf8'))?.[1];
  if (typeof license !== 'string') throw new Error(`${name} names no licence: look at it before it is shipped`);
  const who = typeof author === 'string' ? author : author?.name;
  return { title, text: section ?? `${license}${who === undefined ? '' : `, by ${who}`}` };
}

/** What zeromq's library has inside. */
function readZeromq(root) {
  const read = (file) => readFileSync(join(root, 'third_party', 'zeromq', file), 'utf8');
  const source = 'The sources are at https://github.com/zeromq/libzmq\n\n';
  return [
    { title: 'libzmq 4.3.5 (MPL-2.0)', text: source + read('LICENSE.libzmq') },
    { title: 'libsodium (ISC)', text: read('LICENSE.libsodium') },
  ];
}

function readNode(root) {
  const folder = join(root, 'third_party', 'node');
  const { node } = process.versions;
  if (!existsSync(folder) || !readFileSync(join(folder, 'README.md'), 'utf8').includes(`Node ${node},`))
    throw new Error(`third_party/node holds the licence of another Node than ${node}: replace both files there`);
  return { title: `Node ${node}`, text: readFileSync(join(folder, 'LICENSE'), 'utf8') };
}
