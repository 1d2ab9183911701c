;;;; Channels: sending, receiving, reserving, waiting, ends.

(in-package #:pelton-tests)

(deftest the-codes-are-those-of-the-library
  (is (plusp (hash-table-count pelton::*conditions*)))
  (maphash (lambda (code condition)
             (is (search (format nil ", ~d: ~a." code (pelton::code-text code)) (documentation condition 'type))))
           pelton::*conditions*)
  ;; None is missing.
  (let ((last (reduce #'min (loop for code being the hash-keys of pelton::*conditions* collect code))))
    (is (equal (pelton::code-text (1- last)) "an unknown code"))
    (is (eql (hash-table-count pelton::*conditions*) (- last))))
  (is (subtypep 'pelton:peer-died-error 'pelton:channel-ended))
  (is (subtypep 'pelton:not-reserved-error 'pelton:mistake))
  (is (subtypep 'pelton:timed-out 'pelton:pelton-error)))

(deftest what-lisp-writes-is-laid-out-as-c-has-it
  ;; The places that library.lisp and the others write to and read from, against what the C compiler found.
  (let ((found (make-hash-table :test 'equal)))
    (with-open-file (abi (merge-pathnames "include/pelton.abi" pelton::*checkout*))
      (loop for line = (read-line abi nil)
            while line
            do (let ((words (remove "" (loop for start = 0 then (1+ end)
                                             for end = (position #\Space line :start start)
                                             collect (subseq line start end)
                                             while end)
                                    :test #'string=)))
                 (cond ((string= (first words) "struct")
                        (setf (gethash (second words) found) (parse-integer (fourth words))))
                       ((string= (first words) "field")
                        (setf (gethash (second words) found) (parse-integer (fourth words))))))))
    (loop for (name place) in '(("pelton_options" 96) ("pelton_options.capacity" 8) ("pelton_options.message_bytes_max" 16)
                                ("pelton_options.deadline_ns" 24) ("pelton_options.uids" 32) ("pelton_options.uids_count" 40)
                                ("pelton_options.create" 44) ("pelton_options.mode" 48) ("pelton_options.lanes" 52)
                                ("pelton_options.announce" 56) ("pelton_options.flush_bytes" 64)
                                ("pelton_options.flush_interval_ns" 72) ("pelton_options.call_bytes_max" 80)
                                ("pelton_options.hold_ns" 88) ("pelton_info" 128) ("pelton_info.unreleased" 40)
                                ("pelton_info.services" 120) ("pelton_message" 32) ("pelton_message.data" 0)
                                ("pelton_message.size" 8) ("pelton_message.seq" 16) ("pelton_message.lane" 20)
                                ("pelton_message.flags" 24) ("pelton_run" 48) ("pelton_run.bytes" 16) ("pelton_run.size" 24)
                                ("pelton_run.first_seq" 32) ("pelton_run.messages" 36) ("pelton_run.pid" 40) ("pelton_run.uid" 44)
                                ("pelton_record" 48) ("pelton_record.data" 0) ("pelton_record.size" 8) ("pelton_record.seq" 32)
                                ("pelton_sink" 56) ("pelton_sink.write" 8) ("pelton_sink.context" 16) ("pelton_sink.path" 24)
                                ("pelton_sink.rotate_bytes" 32) ("pelton_sink.sync_bytes" 40) ("pelton_sink.sync_interval_ns" 48)
                                ("pelton_completion" 32) ("pelton_completion.call" 0) ("pelton_completion.data" 8)
                                ("pelton_completion.size" 16) ("pelton_completion.outcome" 24) ("pelton_completion.code" 28)
                                ("pelton_request" 40) ("pelton_request.data" 0) ("pelton_request.size" 8)
                                ("pelton_request.responder" 16) ("pelton_request.pid" 32) ("pelton_request.uid" 36))
          do (is (equal (list name (gethash name found)) (list name place))))))

(deftest messages-of-any-size-come-as-they-were-sent
  (pelton:with-channel (sender receiver :capacity (ash 1 20))
    (dolist (size '(0 1 7 8 9 255 4096 200000))
      (let ((message (make-octets size)))
        (dotimes (i size) (setf (aref message i) (mod (* i 7) 251)))
        (is (pelton:send sender message))
        (multiple-value-bind (found seq lane flags) (pelton:receive receiver)
          (is (equalp found message))
          (is (plusp seq))
          (is (eql lane 0))
          (is (null flags)))))
    (is (null (pelton:try-receive receiver)))))

(deftest a-part-of-a-vector-is-sent-and-bounds-are-looked-at
  (pelton:with-channel (sender receiver)
    (let ((message (bytes "0123456789"))
          (filled (make-array 10 :element-type '(unsigned-byte 8) :fill-pointer 3 :initial-element 65)))
      (pelton:send sender message :start 2 :end 5)
      (is (equal (text (pelton:receive receiver)) "234"))
      (pelton:send sender filled)
      (is (equal (text (pelton:receive receiver)) "AAA"))
      (pelton:send sender (make-array 2 :element-type '(unsigned-byte 8) :displaced-to message :displaced-index-offset 4))
      (is (equal (text (pelton:receive receiver)) "45"))
      (signals error (pelton:send sender message :start 5 :end 11))
      (signals error (pelton:send sender message :start 6 :end 5))
      (signals error (pelton:send sender message :start -1))
      (signals error (pelton:send sender filled :end 4))
      (signals type-error (pelton:send sender "a string"))
      (is (null (pelton:try-receive receiver))))))

(deftest what-is-reserved-is-sent-when-the-body-ends-and-else-never-seen
  (pelton:with-channel (sender receiver)
    (pelton:with-reserved ((sap size) sender 16)
      (is (eql size 16))
      (setf (sap-ref-64 sap 0) 41 (sap-ref-64 sap 8) 42))
    (pelton:with-received ((sap size) receiver)
      (is (eql size 16))
      (is (eql (sap-ref-64 sap 8) 42)))
    ;; Less of it.
    (pelton:with-reserved ((sap size) sender 100)
      (setf (sap-ref-8 sap 0) 7 size 1))
    (is (equalp (pelton:receive receiver) #(7)))
    ;; Left by a throw, an error, and by a return.
    (catch 'out (pelton:with-reserved ((sap size) sender 8) (throw 'out nil)))
    (ignore-errors (pelton:with-reserved ((sap size) sender 8) (error "no")))
    (block nil (pelton:with-reserved ((sap size) sender 8) (return)))
    (is (null (pelton:try-receive receiver)))
    ;; More than was reserved is refused, and nothing of it seen.
    (signals pelton:too-large-error (pelton:with-reserved ((sap size) sender 8) (setf size 9)))
    (is (null (pelton:try-receive receiver)))
    (pelton:send sender (bytes "after"))
    (is (equal (text (pelton:receive receiver)) "after"))))

(deftest what-is-received-is-released-however-the-body-is-left
  (pelton:with-channel (sender receiver)
    (dotimes (i 3) (pelton:send sender (number-octets i)))
    (ignore-errors (pelton:with-received ((sap size) receiver) (error "no")))
    (catch 'out (pelton:with-received ((sap size) receiver) (throw 'out nil)))
    (pelton:with-received ((sap size :seq seq) receiver)
      (is (eql seq 3))
      (is (eql (sap-ref-64 sap 0) 2)))
    (is (eql (getf (pelton:info sender) :unreleased) 0))))

(deftest a-loop-ends-with-the-channel
  (pelton:with-channel (sender receiver)
    (let ((sum 0) (thread (in-thread
                            (dotimes (i 1000) (pelton:send sender (number-octets i)))
                            (pelton:close-handle sender))))
      (is (eq :ended (pelton:do-received ((sap size) receiver :timeout *patience* :result :ended)
                       (incf sum (sap-ref-64 sap 0)))))
      (joined thread)
      (is (eql sum 499500))
      (signals pelton:closed-error (pelton:receive receiver))))
  (pelton:with-channel (sender receiver)
    (dotimes (i 10) (pelton:send sender (number-octets i)))
    (is (eql 3 (pelton:do-messages (octets receiver :seq seq) (when (eql seq 3) (return seq)))))
    (pelton:close-handle sender)
    (let ((left 0))
      (pelton:do-messages (octets receiver) (incf left))
      (is (eql left 7)))))

(deftest what-is-full-or-empty-is-told-with-a-restart-that-waits-longer
  (pelton:with-channel (sender receiver :capacity 65536)
    (signals pelton:timed-out (pelton:receive receiver :timeout 0.01))
    (let ((message (make-octets 20000)) (sent 0))
      (loop while (pelton:try-send sender message) do (incf sent))
      (is (plusp sent))
      (signals pelton:timed-out (pelton:send sender message :timeout 0.01))
      (signals pelton:timed-out (pelton:with-reserved ((sap size) sender 20000 :timeout 0.01) (error "not reached")))
      (let ((waited 0) (thread nil))
        (is (handler-bind ((pelton:timed-out (lambda (condition)
                                               (declare (ignore condition))
                                               (when (eql (incf waited) 2)
                                                 (setf thread (in-thread (dotimes (i sent) (pelton:receive receiver)))))
                                               (invoke-restart 'pelton:wait-longer))))
              (pelton:send sender message :timeout 0.05)))
        (is (>= waited 2))
        (joined thread)
        (is (eql (length (pelton:receive receiver)) 20000)))
      (loop while (pelton:try-send sender message))
      (is (null (handler-bind ((pelton:timed-out (lambda (condition) (invoke-restart (find-restart 'pelton:drop-message condition)))))
                  (pelton:send sender message :timeout 0.01)))))))

(deftest too-large-is-told-and-may-be-dropped
  (pelton:with-channel (sender receiver :message-bytes-max 1000)
    (let ((condition (signals pelton:too-large-error (pelton:send sender (make-octets 1001)))))
      (is (search "1001" (princ-to-string condition)))
      (is (eql (pelton:pelton-error-code condition) -4)))
    (is (null (handler-bind ((pelton:too-large-error (lambda (condition)
                                                       (is (null (find-restart 'pelton:wait-longer condition)))
                                                       (invoke-restart 'pelton:drop-message))))
                (pelton:send sender (make-octets 1001)))))
    (is (null (pelton:try-receive receiver)))))

(deftest a-buffer-too-small-leaves-the-message
  (pelton:with-channel (sender receiver)
    (pelton:send sender (bytes "twelve bytes"))
    (signals pelton:too-small-error (pelton:receive-into receiver (make-octets 5)))
    (let ((buffer (make-octets 20)))
      (is (eql 12 (pelton:receive-into receiver buffer :start 3)))
      (is (equal (text (subseq buffer 3 15)) "twelve bytes")))))

(deftest a-thread-that-waits-can-be-interrupted-and-unwound
  (pelton:with-channel (sender receiver)
    (let* ((seen (sb-thread:make-semaphore)) (begun (sb-thread:make-semaphore))
           (thread (in-thread (catch 'out
                                (sb-thread:signal-semaphore begun)
                                (pelton:receive receiver)))))
      (is (sb-thread:wait-on-semaphore begun :timeout *patience*))
      ;; It may be spinning still, or asleep: either way it hears.
      (sb-thread:interrupt-thread thread (lambda () (sb-thread:signal-semaphore seen)))
      (is (sb-thread:wait-on-semaphore seen :timeout *patience*))
      (sb-thread:interrupt-thread thread (lambda () (throw 'out :left)))
      (is (eq (joined thread) :left)))
    (signals sb-ext:timeout (sb-ext:with-timeout 0.05 (pelton:receive receiver)))
    ;; The channel is as it was.
    (pelton:send sender (bytes "still"))
    (is (equal (text (pelton:receive receiver)) "still"))))

(deftest without-interrupts-is-without-them
  (pelton:with-channel (sender receiver)
    (let* ((heard nil) (waiting (sb-thread:make-semaphore))
           (thread (in-thread
                     (sb-sys:without-interrupts
                       (sb-thread:signal-semaphore waiting)
                       (pelton:receive receiver :timeout *patience*)
                       (list :received heard)))))
      (sb-thread:wait-on-semaphore waiting)
      (sb-thread:interrupt-thread thread (lambda () (setf heard t)))
      (sleep 0.05)
      (pelton:send sender (bytes "now"))
      (is (equal (joined thread) '(:received nil)))
      (is heard))))

(deftest interrupts-while-sending-lose-nothing-and-double-nothing
  (pelton:with-channel (sender receiver :capacity 65536)
    (let* ((count 20000) (ended nil)
           (thread (in-thread
                     (dotimes (i count) (pelton:send sender (number-octets i)))
                     (pelton:close-handle sender)))
           (disturber (in-thread
                        (loop until ended
                              do (ignore-errors (sb-thread:interrupt-thread thread (lambda () (make-octets 100))))
                                 (sleep 0.0005))))
           (next 0))
      (pelton:do-received ((sap size) receiver :timeout *patience*)
        (is (eql (sap-ref-64 sap 0) next))
        (incf next))
      (setf ended t)
      (joined thread)
      (joined disturber)
      (is (eql next count)))))

(deftest many-threads-send-each-by-a-lane-of-its-own
  (pelton:with-receiver (receiver nil :gather t :announce t)
    (pelton:with-senders (senders receiver)
      (let* ((threads (loop for thread below 4
                            collect (let ((thread thread))
                                      (in-thread (dotimes (i 1000)
                                                   (pelton:send senders (number-octets (+ (* thread 1000000) i))))))))
             (next (make-hash-table)) (joined 0) (left 0))
        (loop until (eql left 4)
              do (multiple-value-bind (octets seq lane flags) (pelton:receive receiver :timeout *patience*)
                   (declare (ignore seq))
                   (cond ((equal flags '(:joined)) (incf joined))
                         ;; A thread that ends has closed its lane.
                         ((equal flags '(:left)) (incf left))
                         (t (multiple-value-bind (thread i) (floor (sb-kernel:%vector-raw-bits octets 0) 1000000)
                              (is (equal (gethash lane next (list thread 0)) (list thread i)))
                              (setf (gethash lane next) (list thread (1+ i))))))))
        (mapc #'joined threads)
        (is (eql joined 4))
        (is (eql (hash-table-count next) 4))))))

(deftest ends-that-connect-and-ends-that-are-told
  (let* ((name (format nil "unix:~a" (in-directory "socket")))
         (thread (in-thread
                   (pelton:with-receiver (receiver name :accept t :timeout *patience*)
                     (list (text (pelton:receive receiver :timeout *patience*))
                           (handler-case (pelton:receive receiver :timeout *patience*)
                             (pelton:channel-ended (condition) (type-of condition))))))))
    (pelton:with-sender (sender name :timeout *patience*)
      (pelton:send sender (bytes "hello"))
      (pelton:drain sender :timeout *patience*))
    (is (equal (joined thread) '("hello" pelton:closed-error)))
    (signals pelton:no-listener-error (pelton:open-sender name))
    (signals pelton:no-listener-error (pelton:open-sender name :timeout 0.05))
    (signals pelton:name-error (pelton:open-sender "no/name"))
    (signals pelton:option-error (pelton:make-channel :capacity 5))))

(deftest a-path-keeps-what-was-sent
  (let ((name (format nil "path:~a" (in-directory "channel"))))
    (signals pelton:no-channel-error (pelton:open-sender name))
    (pelton:with-sender (sender name :create t :capacity 65536)
      (pelton:send sender (bytes "kept"))
      (pelton:sync sender))
    (pelton:with-receiver (receiver name)
      (signals pelton:role-taken-error (pelton:open-receiver name))
      (is (equal (text (pelton:receive receiver)) "kept")))))

(deftest a-closed-handle-is-a-mistake-and-closing-twice-is-none
  (multiple-value-bind (sender receiver) (pelton:make-channel)
    (pelton:close-handle sender)
    (pelton:close-handle sender)
    (is (not (pelton:handle-open-p sender)))
    (signals pelton:mistake (pelton:send sender (bytes "x")))
    (signals pelton:mistake (pelton:info sender))
    (pelton:close-handle receiver)
    (signals pelton:mistake (pelton:receive receiver))))

(deftest what-is-forgotten-is-closed-and-said
  (let ((said (make-string-output-stream)) (before *error-output*))
    (sb-ext:gc :full t)
    (flet ((forget (count)
             (loop repeat count
                   collect (multiple-value-bind (sender receiver) (pelton:make-channel :capacity 65536)
                             (pelton:send sender (bytes "x"))
                             receiver))))
      (unwind-protect
           (let ((receivers (progn (setf (symbol-value '*error-output*) (make-synonym-stream 'said-to)
                                         (symbol-value 'said-to) said)
                                   (joined (in-thread (forget 20))))))
             ;; A conservative collector may find what looks like some of them.
             (until (progn (sb-ext:gc :full t)
                           (plusp (count-if (lambda (receiver)
                                              (handler-case (progn (loop while (pelton:try-receive receiver)) nil)
                                                (pelton:closed-error () t)))
                                            receivers))))
             (until (search "a sender was forgotten" (get-output-stream-string said)))
             (mapc #'pelton:close-handle receivers))
        (setf (symbol-value '*error-output*) before)))))

(defvar said-to)
