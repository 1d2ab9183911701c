;;;; The conformance driver in Common Lisp. ../README.md has the command line, the messages and the report.

(defpackage #:driver (:use #:cl))
(in-package #:driver)

(defvar *timeout* 10 "Seconds of each wait.")
(defvar *name*)
(defvar *then* "close")
(defvar *count* 0)
(defvar *sizes* '())
(defvar *letters* nil "The alphabet, repeated: every message is a part of it.")

;;; ---- Messages, and the report about them

(defvar *verb*)
(defvar *messages* 0)
(defvar *bytes* 0)
(defvar *checksum* 0)
(defvar *end* "" "The rest of the report of read-records.")

(declaim (type (simple-array (unsigned-byte 32) (256)) *crcs*))
(defparameter *crcs*
  (coerce (loop for octet below 256
                collect (loop with crc = octet
                              repeat 8
                              do (setf crc (logxor (ash crc -1) (if (logtest crc 1) #xedb88320 0)))
                              finally (return crc)))
          '(simple-array (unsigned-byte 32) (256))))

(defun crc-32 (octets)
  (declare (type pelton:octets octets) (optimize speed))
  (let ((crc #xffffffff) (crcs *crcs*))
    (declare (type (unsigned-byte 32) crc))
    (loop for octet across octets
          do (setf crc (logxor (ash crc -8) (aref crcs (logand (logxor crc octet) 255)))))
    (logxor crc #xffffffff)))

(defun equal-octets (a b)
  (declare (type pelton:octets a b) (optimize speed))
  (and (= (length a) (length b))
       (loop for x across a for y across b always (= x y))))

(defun message (i)
  (let ((start (mod i 26)))
    (subseq *letters* start (+ start (nth (mod i (length *sizes*)) *sizes*)))))

(defun add (octets)
  (incf *messages*)
  (incf *bytes* (length octets))
  (setf *checksum* (ldb (byte 32 0) (+ *checksum* (crc-32 octets)))))

(defun add-next (octets)
  "Adds what has arrived, which must be the next message."
  (unless (and (< *messages* *count*) (equal-octets octets (message *messages*)))
    (error "message ~d of ~d: found ~d bytes, which are not the expected ones" *messages* *count* (length octets)))
  (add octets))

(defun check-count ()
  (unless (= *messages* *count*)
    (error "found ~d messages, expected ~d" *messages* *count*)))

(defun then-p (then)
  (string= *then* then))

(defun traceparent (i)
  "That of message I, or NIL."
  (and (then-p "traced")
       (plusp (mod i 3))
       (format nil "00-~(~32,'0x~)-~(~16,'0x~)-~(~2,'0x~)" (1+ i) (1+ i) (mod i 256))))

(defun check-traceparent (found)
  (unless (equal found (traceparent *messages*))
    (error "message ~d: found the traceparent ~a, expected ~a" *messages* found (traceparent *messages*))))

(defun pathp ()
  (eql 0 (search "path:" *name*)))

(defun report ()
  (format t "ok ~a ~d messages ~d bytes checksum ~(~8,'0x~)~a~%" *verb* *messages* *bytes* *checksum* *end*)
  (finish-output))

(defun die ()
  (report)
  (sb-alien:alien-funcall (sb-alien:extern-alien "raise" (function sb-alien:int sb-alien:int)) 9))

;;; ---- Commands

(defun open-timeout ()
  "By path an open creates the channel, and waits for nobody: messages wait there. By name it waits for the peer."
  (if (pathp) nil *timeout*))

(defun send ()
  (pelton:with-sender (sender *name* :timeout (open-timeout) :create (pathp) :traced (then-p "traced"))
    (flet ((step-by (function)
             (loop
               (handler-case (return (funcall function))
                 (pelton:peer-died-error (condition)
                   ;; The successor gets what the receiver that died has not released.
                   (if (then-p "resume") (pelton:resume sender :timeout *timeout*) (error condition)))))))
      (dotimes (i *count*)
        (let ((message (message i)))
          (step-by (lambda () (pelton:send sender message :timeout *timeout* :traceparent (traceparent i))))
          (add message)))
      (when (then-p "die") (die))
      (step-by (lambda () (pelton:wait-released sender :timeout *timeout*))))))

(defun recv ()
  (let ((checksums '()))                ; of the rest, the last one first
    (pelton:with-receiver (receiver *name* :timeout (open-timeout) :accept (not (pathp)) :create (pathp)
                                            :traced (then-p "traced"))
      (handler-case
          (progn
            (pelton:do-messages (octets receiver :traceparent found :timeout *timeout*) ; until the sender has closed
              (cond ((then-p "rest")
                     (push (crc-32 octets) checksums)
                     (add octets))
                    (t
                     (check-traceparent found)
                     (add-next octets)))
              (when (and (then-p "die") (= *messages* *count*)) (die)))
            (when (then-p "died") (error "the sender has closed, and should have died")))
        (pelton:peer-died-error (condition)
          (unless (then-p "died") (error condition)))))
    (if (then-p "rest")
        (loop initially (unless (<= 1 *messages* *count*) (check-count))
              for found in checksums and i downfrom (1- *count*)
              unless (= found (crc-32 (message i)))
                do (error "what arrived as message ~d is another one" i))
        (check-count))))

(defun gather ()
  (pelton:with-gathering-receiver (receiver *name*)
    (dotimes (i *count*)
      (let ((octets (pelton:receive receiver :timeout *timeout*))) ; of all senders, round-robin
        (write-line (map 'string #'code-char (subseq octets 0 (min (first *sizes*) (length octets)))))
        (finish-output)
        (add octets)))))

(defun call ()
  (pelton:with-client (client *name* :timeout *timeout*)
    (dotimes (i *count*)
      (add-next (pelton:call client (message i) :timeout *timeout*)))))

(defun stream-reply ()
  (pelton:with-client (client *name* :timeout *timeout*)
    (loop with call = (pelton:submit client (message 0) :timeout *timeout*)
          for (octets outcome) = (multiple-value-list (pelton:await client :call call :timeout *timeout*))
          unless (eq outcome :end) do (add-next octets)
          while (eq outcome :part)))
  (check-count))

(defun serve-by (handler)
  "Serves with HANDLER, which gets the service and a request, until it drains the service."
  (pelton:with-service (service *name*)
    (let ((timer (sb-ext:make-timer (lambda () (error "no request has come")) :thread sb-thread:*current-thread*)))
      (sb-ext:schedule-timer timer *timeout*)
      (pelton:serve service (lambda (request)
                              (sb-ext:unschedule-timer timer)
                              (prog1 (funcall handler service request)
                                (sb-ext:schedule-timer timer *timeout*))))
      (sb-ext:unschedule-timer timer))))

(defun serve ()
  (serve-by (lambda (service request)
              (add (pelton:request-octets request))
              ;; Draining replies to what was received, this request included; then SERVE returns.
              (when (= *messages* *count*) (pelton:drain service))
              (pelton:request-octets request))))

(defun serve-stream ()
  (serve-by (lambda (service request)
              (dotimes (i *count*)
                (pelton:reply-part request (message i) :timeout *timeout*)
                (add (message i)))
              (pelton:drain service)
              (pelton:end-reply request)))
  (check-count))

(defun write-records ()
  (pelton:with-appenders (appenders (pelton:record-file *name*))
    (dotimes (i *count*)
      (pelton:append-message appenders (message i))
      (add (message i)))
    (pelton:sync appenders)))

(defun read-records ()
  (let* ((damaged 0)
         (end (handler-case
                  (handler-bind ((pelton:damaged-error (lambda (condition)
                                                         (incf damaged)
                                                         (pelton:skip-damage condition))))
                    (pelton:map-record-file (lambda (octets seq) (declare (ignore seq)) (add octets)) *name*))
                (pelton:later-version-error () :later)
                (pelton:not-a-record-file-error () :refused))))
    (setf *end* (format nil " damaged ~d ~(~a~)" damaged end))))

;;; ---- The command line

(defparameter *commands* '(("send" send "close" "die" "resume" "traced")
                           ("recv" recv "close" "died" "die" "rest" "traced")
                           ("call" call) ("serve" serve) ("stream" stream-reply) ("serve-stream" serve-stream)
                           ("gather" gather) ("write-records" write-records) ("read-records" read-records))
  "The verb, its function, and its THENs.")

(defun numbers (text)
  "The numbers of a list with commas, or NIL."
  (loop for start = 0 then (1+ end)
        for end = (position #\, text :start start)
        for number = (subseq text start end)
        unless (and (plusp (length number)) (every #'digit-char-p number)) do (return '())
        collect (parse-integer number)
        while end))

(defun set-arguments (name &optional (count "0") (sizes "0") (then "close"))
  "Returns true if they are right."
  (setf *name* name
        *then* then
        *count* (first (numbers count))
        *sizes* (numbers sizes))
  (when (and *count* *sizes*)
    (let ((letters (pelton:make-octets (+ 26 (reduce #'max *sizes*)))))
      (setf *letters* (map-into letters (let ((j -1)) (lambda () (+ (char-code #\a) (mod (incf j) 26)))))))))

(defun run (&optional (verb "") &rest arguments)
  "The exit code."
  (destructuring-bind (&optional command &rest thens) (rest (assoc verb *commands* :test #'string=))
    (setf *verb* verb)
    (cond ((null command)
           (format t "unsupported ~a: ~a~%" verb (if (string= verb "vectors")
                                                     "libpelton, which it uses, is tested with the vectors"
                                                     "this driver does not have it"))
           3)
          ((not (and (case (length arguments)
                       (1 (eq command 'read-records))
                       (3 (not (eq command 'read-records)))
                       (4 (member (fourth arguments) thens :test #'string=)))
                     (apply #'set-arguments arguments)))
           (format *error-output* "usage: driver ~a NAME COUNT SIZES [THEN], as conformance/README.md has it~%" verb)
           2)
          (t
           (funcall command)
           (report)
           0))))

(defun main ()
  (setf *timeout* (parse-integer (or (sb-ext:posix-getenv "PELTON_SECONDS") "10")))
  (sb-ext:exit :code (handler-case (apply #'run (rest sb-ext:*posix-argv*))
                       (serious-condition (condition)
                         (format *error-output* "~a~%" condition)
                         1))))
