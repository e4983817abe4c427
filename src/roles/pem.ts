import type { X509Certificate } from 'node:crypto';
import process from 'node:process';
import { createSecureContext } from 'node:tls';
import { holdsCertificate } from '../core/pem.ts';
import { StartError } from './listen.ts';

/** Texts of PEM files; what is absent is not used. */
export interface PemTexts {
  readonly cert?: string | undefined;
  readonly key?: string | undefined;
  readonly ca?: string | undefined;
}

const KEY = /-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----/;

/**
 * Refuses what cannot be used for TLS.
 *
 * @throws StartError with what is wrong of the files, in words
 */
export function checkPem({ cert, key, ca }: PemTexts): void {
  if (cert !== undefined && key !== undefined && !holdsCertificate(cert) && KEY.test(cert) && holdsCertificate(key)) {
    throw new StartError(
      'the certificate and the key are swapped: the file of cert holds a key, that of key a certificate',
    );
  }
  if (cert !== undefined && !holdsCertificate(cert))
    throw new StartError('the file of cert holds no certificate (PEM)');
  if (key !== undefined && !KEY.test(key)) throw new StartError('the file of key holds no private key (PEM)');
  if (ca !== undefined && !holdsCertificate(ca))
    throw new StartError('the file of authorities holds no certificate (PEM)');
  try {
    createSecureContext({
      ...(cert === undefined ? {} : { cert }),
      ...(key === undefined ? {} : { key }),
      ...(ca === undefined ? {} : { ca }),
    });
  } catch (error) {
    throw new StartError(whyRefused(error), { cause: error });
  }
  if (cert !== undefined) checkTime(readCertificate(cert));
}

/** Whoever checks the certificate would turn away; and one that is replaced in time by such a one stays in use. */
function checkTime({ validFromDate, validToDate }: X509Certificate): void {
  const now = Date.now();
  if (validToDate.getTime() <= now) throw new StartError(`the certificate expired on ${day(validToDate)}; renew it`);
  if (validFromDate.getTime() > now) {
    throw new StartError(`the certificate is valid from ${day(validFromDate)} on; is the clock of this machine right?`);
  }
}

const CERTIFICATE = /-----BEGIN ([A-Z0-9 ]*CERTIFICATE)-----[\s\S]*?-----END \1-----/g;

/** Unix time, in milliseconds, at which a certificate or one of the chain behind it ends first. */
export function endOfChain(cert: string): number {
  const ends = [...cert.matchAll(CERTIFICATE)].map(([text]) => readCertificate(text).validToDate.getTime());
  return Math.min(...ends);
}

/** The class is taken from its module when it is used: a start without certificates does not open that. */
function readCertificate(text: string): X509Certificate {
  const { X509Certificate } = process.getBuiltinModule('node:crypto');
  return new X509Certificate(text);
}

function day(date: Date): string {
  return date.toISOString().slice(0, 16).replace('T', ' ').concat(' UTC');
}

/** By the codes of Node and OpenSSL. */
const REASONS: Readonly<Record<string, string>> = {
  ERR_OSSL_X509_KEY_VALUES_MISMATCH: 'the key is not that of the certificate',
  ERR_MISSING_PASSPHRASE: 'the key is encrypted; give one without a passphrase',
  ERR_OSSL_BAD_DECRYPT: 'the key is encrypted; give one without a passphrase',
};

function whyRefused(error: unknown): string {
  const code = error instanceof Error && 'code' in error ? String(error.code) : String(error);
  return REASONS[code] ?? `the certificate or the key is damaged (${code})`;
}
