"""How is a request without a body signed for an S3 server?

AWS Signature Version 4.
"""

import hashlib
import hmac
import time
from urllib.parse import urlsplit


def signed_headers(method: str, url: str, *, access_key: str, secret_key: str, now: time.struct_time) -> dict[str, str]:
    """Return the headers of a signed request with an empty body and no query, region us-east-1.

    Source: "Signature Calculations for the Authorization Header" of the S3 API reference.
    """
    where = urlsplit(url)
    stamp, day = time.strftime("%Y%m%dT%H%M%SZ", now), time.strftime("%Y%m%d", now)
    body_digest = hashlib.sha256(b"").hexdigest()
    headers = {"host": where.netloc, "x-amz-content-sha256": body_digest, "x-amz-date": stamp}
    names = ";".join(headers)
    lines = [method, where.path or "/", "", *(f"{name}:{value}" for name, value in headers.items()), "", names]
    canonical = "\n".join([*lines, body_digest])
    scope = f"{day}/us-east-1/s3/aws4_request"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{secret_key}".encode()
    for part in (day, "us-east-1", "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    credential = f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "authorization": credential}
