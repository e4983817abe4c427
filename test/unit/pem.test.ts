import { X509Certificate } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import { checkPem, endOfChain } from '../../src/roles/pem.ts';

const read = (name: string) => readFileSync(new URL(`../fixtures/tls/${name}`, import.meta.url), 'utf8');
const [cert, key, ca] = [read('server.pem'), read('server.key'), read('ca.pem')];

test('certificates and keys that belong together are taken, also in one file', () => {
  expect(() => checkPem({ cert, key, ca })).not.toThrow();
  expect(() => checkPem({ cert: key + cert, key: key + cert })).not.toThrow();
  expect(() => checkPem({ ca })).not.toThrow();
});

test.each([
  ['swapped files', { cert: key, key: cert }, /^the certificate and the key are swapped/],
  ['a key alone', { cert: key, key }, /^the file of cert holds no certificate/],
  ['no key', { cert, key: 'hello' }, /^the file of key holds no private key/],
  ['no authorities', { ca: '' }, /^the file of authorities holds no certificate/],
  ['the key of another', { cert, key: read('client.key') }, /^the key is not that of the certificate$/],
  [
    'an expired certificate',
    { cert: read('expired.pem'), key: read('expired.key') },
    /^the certificate expired on .* UTC; renew it$/,
  ],
  ['a damaged chain', { cert: `${cert}${ca.replace(/\n.{20}/, '\n')}`, key }, /is damaged \(ERR_\w+\)$/],
  ['half a file', { cert: cert.replace(/\n.{20}/, '\n'), key }, /^the certificate or the key is damaged \(ERR_\w+\)$/],
])('%s are told in words', (_, texts, message) => {
  expect(() => checkPem(texts)).toThrow(message);
});

test('a chain ends with what ends first in it', () => {
  const endOf = (name: string) => new X509Certificate(read(name)).validToDate.getTime();
  expect(endOfChain(cert)).toBe(endOf('server.pem'));
  expect(endOfChain(`${key}\n${cert}\n${ca}`)).toBe(Math.min(endOf('server.pem'), endOf('ca.pem')));
  expect(endOfChain(cert + read('expired.pem'))).toBe(endOf('expired.pem'));
});
