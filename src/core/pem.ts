/** Whether the text of a PEM file holds a certificate. */
export function holdsCertificate(text: string): boolean {
  return /-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----/.test(text);
}
