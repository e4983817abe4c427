/** Where a user says whom to trust, and what to show. */
export interface TlsSettings {
  readonly ca: string;
  readonly cert: string;
}

const SERVE: TlsSettings = { ca: 'rpc_client.ca, --rpc-client-ca', cert: 'rpc_client.cert, --rpc-client-cert' };

type Words = (settings: TlsSettings) => string;

const UNTRUSTED: Words = ({ ca }) =>
  `its certificate is of an authority that is not trusted here: name the file of that authority (${ca})`;
const WANTS_CERTIFICATE: Words = ({ cert }) => `it wants a certificate of this process (${cert})`;
const NOT_TRUSTED_THERE: Words = ({ cert }) => `it does not accept the certificate of this process (${cert})`;
const NO_TLS: Words = () => 'it does not speak TLS: its URL may have to begin with http:';
const NO_HTTP2: Words = () => 'it does not speak HTTP/2 there: is that its RPC port, and http: or https: right?';
const NO_WAY: Words = () => 'there is no way to its host';
const UNKNOWN_HOST: Words = () => 'its host name is not known';

/** By the codes of Node and OpenSSL. */
const WORDS: Readonly<Record<string, Words>> = {
  ECONNREFUSED: () => 'nothing listens there',
  ENOENT: () => 'there is no such socket',
  ENOTSOCK: () => 'that file is no socket',
  EACCES: () => 'this process may not use that socket',
  ENOTFOUND: UNKNOWN_HOST,
  EAI_AGAIN: UNKNOWN_HOST,
  EHOSTUNREACH: NO_WAY,
  ENETUNREACH: NO_WAY,
  ERR_HTTP2_ERROR: NO_HTTP2,
  DEPTH_ZERO_SELF_SIGNED_CERT: UNTRUSTED,
  SELF_SIGNED_CERT_IN_CHAIN: UNTRUSTED,
  UNABLE_TO_GET_ISSUER_CERT: UNTRUSTED,
  UNABLE_TO_GET_ISSUER_CERT_LOCALLY: UNTRUSTED,
  UNABLE_TO_VERIFY_LEAF_SIGNATURE: UNTRUSTED,
  CERT_SIGNATURE_FAILURE: UNTRUSTED,
  CERT_HAS_EXPIRED: () => 'its certificate has expired',
  CERT_NOT_YET_VALID: () => 'its certificate is not valid yet',
  ERR_TLS_CERT_ALTNAME_INVALID: () => 'its certificate is for another name than that of its URL',
  EPROTO: NO_TLS,
  ERR_SSL_WRONG_VERSION_NUMBER: NO_TLS,
  ERR_SSL_PACKET_LENGTH_TOO_LONG: NO_TLS,
  ERR_SSL_TLSV13_ALERT_CERTIFICATE_REQUIRED: WANTS_CERTIFICATE,
  ERR_SSL_SSLV3_ALERT_HANDSHAKE_FAILURE: WANTS_CERTIFICATE,
  ERR_SSL_TLSV1_ALERT_UNKNOWN_CA: NOT_TRUSTED_THERE,
  ERR_SSL_SSLV3_ALERT_BAD_CERTIFICATE: NOT_TRUSTED_THERE,
  ERR_SSL_SSLV3_ALERT_CERTIFICATE_EXPIRED: NOT_TRUSTED_THERE,
};

/**
 * Why a connection could not be made, for people; undefined for a failure of another kind. `settings` names what the
 * reader can set.
 */
export function whyNoConnection(thrown: unknown, settings: TlsSettings = SERVE): string | undefined {
  for (let error = thrown; error instanceof Error; error = error.cause) {
    const code = 'code' in error && typeof error.code === 'string' ? error.code : '';
    const words = Object.hasOwn(WORDS, code) ? WORDS[code] : undefined;
    if (words !== undefined) return words(settings);
  }
  return undefined;
}
