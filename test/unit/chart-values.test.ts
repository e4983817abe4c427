import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, test } from 'vitest';
import { parse } from 'yaml';
import { z } from 'zod';
import { describeKeys } from '../../src/config/describe-keys.ts';
import { CHART } from '../support/manifests.ts';

const DOCS = new URL('../../docs/kubernetes.md', import.meta.url);

interface Value {
  readonly path: readonly string[];
  readonly about: string;
}

/** The keys of values.yaml that have a comment, and those that have neither a comment nor keys that have one. */
function readValues(text: string): { readonly values: readonly Value[]; readonly silent: readonly string[] } {
  const values: Value[] = [];
  const sections: { readonly path: string; used: boolean }[] = [];
  let path: readonly string[] = [];
  let about: string[] = [];
  for (const line of text.split('\n')) {
    const comment = /^ *# (.*)$/.exec(line);
    const key = /^( *)(\w+):/.exec(line);
    if (comment !== null) about.push(comment[1] ?? '');
    else if (key === null) about = [];
    else {
      path = [...path.slice(0, (key[1] ?? '').length / 2), key[2] ?? ''];
      const above = values.some((value) => value.path.every((part, i) => part === path[i]));
      if (about.length > 0) {
        values.push({ path, about: about.join(' ') });
        for (const section of sections) section.used ||= path.join('.').startsWith(`${section.path}.`);
      } else if (!above) sections.push({ path: path.join('.'), used: false });
      about = [];
    }
  }
  return { values, silent: sections.filter(({ used }) => !used).map((section) => section.path) };
}

const text = readFileSync(join(CHART, 'values.yaml'), 'utf8');
const { values, silent } = readValues(text);

function table(): string {
  const defaults: unknown = parse(text);
  const rows = values.map(({ path, about }) => {
    const fallback = path.reduce((at: unknown, key) => z.record(z.string(), z.unknown()).parse(at)[key], defaults);
    return `| \`${path.join('.')}\` | \`${JSON.stringify(fallback)}\` | ${about} |`;
  });
  return ['| key | default | meaning |', '|---|---|---|', ...rows].join('\n');
}

describe('values of the chart', () => {
  test('are in the table of docs/kubernetes.md (UPDATE_DOCS=1 writes it)', () => {
    const block = /(<!-- values:[^\n]*-->\n)[\s\S]*?(<!-- end -->)/;
    const docs = readFileSync(DOCS, 'utf8');
    const written = docs.replace(block, (_, start: string, end: string) => `${start}\n${table()}\n\n${end}`);
    if (process.env['UPDATE_DOCS'] !== undefined) writeFileSync(DOCS, written);
    expect(readFileSync(DOCS, 'utf8')).toBe(written);
    expect(docs).toMatch(block);
  });

  test('have a sentence each', () => {
    expect(values.length).toBeGreaterThan(50);
    expect(silent).toEqual([]);
    for (const { path, about } of values) expect(about, path.join('.')).toMatch(/^\S.*\.$/);
  });

  interface Node {
    readonly additionalProperties?: unknown;
    readonly properties?: Readonly<Record<string, Node>> | undefined;
  }
  const node: z.ZodType<Node> = z.lazy(() =>
    z.object({ additionalProperties: z.unknown().optional(), properties: z.record(z.string(), node).optional() }),
  );
  const schema = node.parse(JSON.parse(readFileSync(join(CHART, 'values.schema.json'), 'utf8')));
  const at = (path: readonly string[]) => path.reduce<Node | undefined>((each, key) => each?.properties?.[key], schema);

  test('are those of the schema, which knows no others', () => {
    for (const { path } of values) {
      expect(at(path), path.join('.')).toBeDefined();
      for (let end = 0; end < path.length; end += 1)
        expect(at(path.slice(0, end))?.additionalProperties, path.slice(0, end).join('.')).toBe(false);
    }
    const leaves = (each: Node, path: readonly string[]): readonly string[] =>
      values.some((value) => value.path.join('.') === path.join('.')) || each.properties === undefined
        ? [path.join('.')]
        : Object.entries(each.properties).flatMap(([key, child]) => leaves(child, [...path, key]));
    // Helm's own, for charts that have this one as a part.
    const known = [...values.map(({ path }) => path.join('.')), 'global'];
    expect(leaves(schema, []).toSorted()).toEqual(known.toSorted());
  });

  test('let `config` have the keys of baton.yaml that the chart does not set', () => {
    const own = ['roles', 'router_url', 'kvstore_url', 'registry_url', 'rpc', 'rpc_client', 'admin'];
    const keys = new Set(describeKeys().map(({ path }) => path.split(/[.[]/, 1)[0] ?? ''));
    expect([...keys]).toEqual(expect.arrayContaining(own));
    const allowed = Object.keys(at(['config'])?.properties ?? {});
    expect(allowed.toSorted()).toEqual([...keys].filter((key) => !own.includes(key)).toSorted());
  });
});
